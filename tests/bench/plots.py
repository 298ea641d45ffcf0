"""docs/pictures/benchmarks.svg: the ratios of docs/benchmarks.json as bars. ``make generate``."""

from __future__ import annotations

from tests.bench.commands import ROOT
from tests.bench.results import Results
from tests.bench.table import GROUPS

PICTURE = ROOT / "docs" / "pictures" / "benchmarks.svg"
# What is drawn: the format, and the rows of one kind by the end of their ids.
FORMATS = ("Q4_1", "Q4_0", "Q8_0", "Q4_K_M", "BF16")
KINDS = {"pp512": "reading a prompt of 512", "tg128": "1 stream", "tg16": "16 streams"}

_LEFT, _TOP, _UNIT, _BAR = 80, 56, 84, 16  # pixels: of the first bar, of a ratio of 1, of a bar's height
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"
 width="{width}" height="{height}" role="img">
<title>Tokens a second over those of llama.cpp</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
.end {{ text-anchor: end }}
.even {{ stroke: #59636e; stroke-dasharray: 3 3 }}
.pp512 {{ fill: #0969da }} .tg128 {{ fill: #bf8700 }} .tg16 {{ fill: #1a7f37 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }} .even {{ stroke: #9198a1 }}
.pp512 {{ fill: #58a6ff }} .tg128 {{ fill: #d29922 }} .tg16 {{ fill: #3fb950 }}
}}
</style>"""


def picture(results: Results) -> str:
    """Bars of each format that was measured, and a line where both are equally fast."""
    ratios = _ratios(results)
    formats = [name for name in FORMATS if any((name, kind) in ratios for kind in KINDS)]
    height = _TOP + len(formats) * (len(KINDS) * _BAR + 14) + 22
    width = _LEFT + round(max(ratios.values()) * _UNIT) + 60
    lines = [_HEAD.format(width=width, height=height), *_legend()]
    for index, name in enumerate(formats):
        lines += _bars(name, ratios, _TOP + index * (len(KINDS) * _BAR + 14))
    even = _LEFT + _UNIT
    lines.append(f'<line class="even" x1="{even}" y1="{_TOP - 6}" x2="{even}" y2="{height - 22}"/>')
    lines.append(f'<text x="{even}" y="{height - 6}" text-anchor="middle">llama.cpp = 1</text>')
    return "\n".join([*lines, "</svg>\n"])


def _ratios(results: Results) -> dict[tuple[str, str], float]:
    measured: dict[tuple[str, str], float] = {}
    for row in (row for group in GROUPS.values() for row in group.rows):
        name, _, kind = row.id.partition("-")
        ratio = results.ratio(row)
        if name in FORMATS and kind in KINDS and ratio is not None:
            measured[name, kind] = ratio
    return measured


def _legend() -> list[str]:
    title = "SmolLM2-135M, tokens a second over those of llama.cpp, same machine and threads"
    lines = [f'<text x="0" y="14">{title}</text>']
    x = _LEFT
    for kind, label in KINDS.items():
        lines.append(f'<rect class="{kind}" x="{x}" y="27" width="12" height="12"/>')
        lines.append(f'<text x="{x + 18}" y="38">{label}</text>')
        x += 42 + 7 * len(label)
    return lines


def _bars(name: str, ratios: dict[tuple[str, str], float], top: int) -> list[str]:
    middle = top + len(KINDS) * _BAR // 2 + 4
    lines = [f'<text class="end" x="{_LEFT - 8}" y="{middle}">{name}</text>']
    for index, kind in enumerate(KINDS):
        ratio, y = ratios.get((name, kind)), top + index * _BAR
        if ratio is None:
            continue
        length = round(ratio * _UNIT)
        lines.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{length}" height="{_BAR - 2}" rx="2"/>')
        lines.append(f'<text x="{_LEFT + length + 6}" y="{y + 12}">{ratio:.1f}</text>')
    return lines


def write() -> None:
    PICTURE.write_text(picture(Results()), encoding="utf-8")


if __name__ == "__main__":
    write()

"""docs/benchmarks.md, written from the results and from nothing else."""

from __future__ import annotations

from tests.bench.commands import ROOT
from tests.bench.results import Results, Row
from tests.bench.table import GROUPS

DOCUMENT = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

![Tokens a second over those of llama.cpp, by format and load](pictures/benchmarks.svg)

Written by `make bench-peers` (with `make bench-cache` and `make bench-spec` for their rows) from
`docs/benchmarks.json`; not edited by hand. `python -m tests.bench.peers --rows GROUP ...` measures some groups again.

Every group is measured in rounds, ours and the other one in turn in each; the figures are medians over the rounds, the
ratio is the median of the rounds' own ratios, ours over theirs. Absolute figures differ from machine to machine and
from hour to hour; ratios less so. Both sides read the same files with the same number of threads. How llama.cpp was
built is what `--peer-build` or `$LLAMA_CPP_BUILD` said of it. SmolLM2 is SmolLM2-135M-Instruct; formats other than Q4_1
are made of that file with `llama-quantize --allow-requantize`. The 8B model has the shape of Qwen3-8B and random
weights (`tests/bench/synthetic.py`).

The commands used are part of the product:

- `trio-tlserve bench --model-dir MODEL` measures the engine without a server, in the terms of llama-bench and
  llama-batched-bench.
- `trio-tlserve load --base-url http://HOST:PORT/v1` measures any OpenAI-compatible server from outside.
- `trio-tlserve perplexity --model-dir MODEL TEXT` prints what llama-perplexity would.

Each takes `--json`; the first two draw pictures with `--plot FILE.png` (`pip install '.[bench]'` in a clone).

`tokens/s` of "decode, 16 streams" is `S_TG` of llama-batched-bench with 128 + 64 tokens. Over HTTP it counts generated
tokens over the whole time from the first request to the last answer, prompts included.
"""


def write(results: Results) -> None:
    machine = "\n".join(f"| {name} | {value} |" for name, value in results.content.get("machine", {}).items())
    lines = [HEAD, "## The machine", "", "| | |", "|---|---|", machine, "", "## Results", ""]
    lines += ["| | ours | other | | ratio | must be | |", "|---|---:|---:|---|---:|---|---|"]
    measured = {name: group for name, group in GROUPS.items() if results.medians(group.rows[0]) is not None}
    for group in measured.values():
        lines += [line(row, results) for row in group.rows]
    lines += ["", "## How each was measured", "", "| group | commands | rounds |", "|---|---|---:|"]
    for name, group in measured.items():
        how = "; ".join(f"`{part}`" for part in group.how.split("; "))
        lines.append(f"| {name} | {how} | {results.num_rounds(group.rows[0])} |")
    DOCUMENT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def line(row: Row, results: Results) -> str:
    """One line of the table; says where a figure falls short."""
    medians = results.medians(row)
    assert medians is not None
    ours, theirs = medians
    ratio = results.ratio(row)
    verdict = "" if ratio is None or not row.rule else "yes" if row.holds(ratio) else "**no**"
    return " | ".join(
        [
            f"| {row.title}",
            _number(ours, row),
            "" if theirs is None else _number(theirs, row),
            "" if theirs is None else row.theirs,
            "" if ratio is None else f"{ratio:.3f}" if row.rule == "within" else f"{ratio:.2f}",
            row.rule_text,
            f"{verdict} |",
        ]
    )


def _number(value: float, row: Row) -> str:
    return f"{value:,.{row.digits}f} {row.unit}".rstrip()

"""The table of cases in docs/conformance.md, from the cases themselves. ``make generate`` writes it."""

from __future__ import annotations

from pathlib import Path

from tlserve.conform.catalogue import ALL_CASES

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_BEGIN, _END = "<!-- cases: make generate -->\n", "<!-- end of cases -->\n"


def page_text(current: str) -> str:
    """``current`` with its table of cases made new."""
    head, rest = current.split(_BEGIN)
    return head + _BEGIN + _table() + _END + rest.split(_END)[1]


def _table() -> str:
    rows = [f"| [`{case.id}`]({case.page}) | {case.level} | {case.rule} |" for case in ALL_CASES]
    return "\n".join(["| case | level | rule |", "|---|---|---|", *rows]) + "\n"

"""Measured values by row, kept in a file, so that parts of the table can be measured again on their own."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.bench.commands import ROOT

RESULTS = ROOT / "docs" / "benchmarks.json"

# What one round gives for a row: ours, and the other one's where there is one.
Sample = tuple[float, float | None]


@dataclass(frozen=True)
class Row:
    """One line of the table. The rule is about the ratio, ours over theirs."""

    id: str
    title: str
    unit: str
    rule: Literal["at least", "at most", "within", ""] = ""
    bound: float = 0.0
    theirs: str = "llama.cpp"
    digits: int = 0

    def holds(self, ratio: float) -> bool:
        match self.rule:
            case "at least":
                return ratio >= self.bound
            case "at most":
                return ratio <= self.bound
            case "within":
                return abs(ratio - 1) <= self.bound
        return True

    @property
    def rule_text(self) -> str:
        if self.rule == "within":
            return f"within {self.bound:.1%}"
        return f"{self.rule} {self.bound:g}" if self.rule else ""


class Results:
    """The file, as it was and with what this run adds. A row that is measured again is replaced whole."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}

    def put(self, row: Row, samples: list[Sample]) -> None:
        theirs = [sample[1] for sample in samples if sample[1] is not None]
        self.content["rows"][row.id] = {
            "ours": [round(sample[0], 4) for sample in samples],
            "theirs": [round(value, 4) for value in theirs],
        }

    def medians(self, row: Row) -> tuple[float, float | None] | None:
        """None for a row that was never measured."""
        stored = self.content["rows"].get(row.id)
        if stored is None:
            return None
        theirs = statistics.median(stored["theirs"]) if stored["theirs"] else None
        return statistics.median(stored["ours"]), theirs

    def ratio(self, row: Row) -> float | None:
        """The median of the rounds' own ratios: what changes from round to round changes both."""
        stored = self.content["rows"].get(row.id)
        if stored is None or not stored["theirs"]:
            return None
        ratio: float = statistics.median(a / b for a, b in zip(stored["ours"], stored["theirs"], strict=True))
        return ratio

    def num_rounds(self, row: Row) -> int:
        return len(self.content["rows"][row.id]["ours"])

    def save(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1, sort_keys=True) + "\n")

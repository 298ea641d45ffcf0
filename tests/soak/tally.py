"""What happened to the requests of a run, by who sent them, and everything that was not as it must be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_SHOWN = 20  # faults in the report


@dataclass
class Tally:
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind of client, outcome)
    refusal_seconds: list[float] = field(default_factory=list)  # how long each 429 took
    wrong: list[str] = field(default_factory=list)  # answers that differ from the recorded ones
    faults: list[str] = field(default_factory=list)  # anything else that must not happen

    def table(self) -> str:
        rows = [f"{kind:<22}{outcome:<40}{count:>8}" for (kind, outcome), count in sorted(self.outcomes.items())]
        return "\n".join([*rows, f"{'':<22}{'all':<40}{sum(self.outcomes.values()):>8}"])


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of them do not pass."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0

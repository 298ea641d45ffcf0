"""One expression for many strings, the longest first: a plain list of alternatives would try each at each place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_MAX_NESTING = 24  # of groups; beyond it, alternatives are listed


def longest_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `strings` that stands at a place; no strings match nowhere."""
    tails = sorted(set(strings) - {""})
    return re.compile(_pattern(tails, 0) if tails else "(?!)")


def _pattern(tails: list[str], nesting: int) -> str:
    """An expression for `tails`: sorted, different from one another, "" possibly the first."""
    if nesting == _MAX_NESTING:
        return "(?:" + "|".join(map(re.escape, sorted(tails, key=len, reverse=True))) + ")"
    if tails[0] == "":
        return f"(?:{_pattern(tails[1:], nesting + 1)})?" if len(tails) > 1 else ""
    branches = []
    for _, group in itertools.groupby(tails, key=lambda tail: tail[0]):
        members = list(group)
        shared = _common_start(members[0], members[-1])
        branches.append(re.escape(shared) + _pattern([tail[len(shared) :] for tail in members], nesting + 1))
    return "(?:" + "|".join(branches) + ")" if len(branches) > 1 else branches[0]


def _common_start(first: str, last: str) -> str:
    """What two strings begin with; of a sorted list's ends, what all begin with."""
    size = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[: min(len(first), len(last)) if size is None else size]

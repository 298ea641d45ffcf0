"""Values found in an answer. A look at one that is not what it should be fails the case, naming place and value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tlserve.conform.case import Failed

SHORT = 160  # characters of anything that a failure quotes


def short(text: str) -> str:
    """On one line, and with its middle left out where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= SHORT else f"{text[: SHORT - 20]} ... {text[-15:]}"


def shown(value: object) -> str:
    """A value as JSON, cut short."""
    return short(json.dumps(value, ensure_ascii=False, default=repr))


class Found:
    """``value`` at ``place`` of the answer to ``sent``. Every method raises Failed when the value is not as asked."""

    def __init__(self, value: Any, place: str, sent: str) -> None:
        self.value = value
        self.place = place
        self.sent = sent

    def __getitem__(self, key: str | int) -> Found:
        if isinstance(key, str):
            place = f"{self.place}.{key}" if self.place else key
            self.check(isinstance(self.value, dict), "an object")
            if key not in self.value:
                raise Failed(sent=self.sent, expected=f"{place}", came=f"no such key in {shown(self.value)}")
            return Found(self.value[key], place, self.sent)
        place = f"{self.place}[{key}]"
        self.check(isinstance(self.value, list), "a list")
        if not -len(self.value) <= key < len(self.value):
            raise Failed(sent=self.sent, expected=f"{place}", came=f"a list of {len(self.value)}")
        return Found(self.value[key], place, self.sent)

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def check(self, holds: bool, expected: str) -> None:
        """Fail unless ``holds``; ``expected`` says what the value should have been."""
        if not holds:
            came = self.value if isinstance(self.value, str) and not self.place else shown(self.value)
            name = self.place or "the answer"
            raise Failed(sent=self.sent, expected=f"{name}: {expected}", came=short(str(came)))

    def equals(self, expected: object) -> None:
        same = self.value == expected and isinstance(self.value, bool) == isinstance(expected, bool)
        self.check(same, shown(expected))

    def is_in(self, expected: Sequence[object]) -> None:
        self.check(self.value in expected, f"one of {shown(list(expected))}")

    def text(self) -> str:
        self.check(isinstance(self.value, str), "a string")
        return str(self.value)

    def integer(self, least: int = 0) -> int:
        is_integer = isinstance(self.value, int) and not isinstance(self.value, bool)
        self.check(is_integer and self.value >= least, f"an integer of {least} or more")
        return int(self.value)

    def number(self) -> float:
        self.check(isinstance(self.value, int | float) and not isinstance(self.value, bool), "a number")
        return float(self.value)

    def items(self, count: int | None = None) -> list[Found]:
        self.check(isinstance(self.value, list), "a list")
        self.check(count is None or len(self.value) == count, f"a list of {count}")
        return [self[index] for index in range(len(self.value))]

"""A case: one rule, a function that tries it, and how it can end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tlserve.conform.subject import Subject

# "core": what every OpenAI-compatible server should do; "contract": what this one promises beyond that.
Level = Literal["core", "contract"]
Check = Callable[["Subject"], Awaitable[None]]


class Failed(Exception):
    """The server broke the rule. Each part is short enough for a terminal."""

    def __init__(self, *, sent: str, expected: str, came: str) -> None:
        super().__init__(f"sent {sent}; expected {expected}; came {came}")
        self.sent = sent
        self.expected = expected
        self.came = came


class Skipped(Exception):
    """The rule cannot be tried on this server; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    rule: str  # one sentence
    page: str  # where the rule is explained: a page of docs/ and its section
    level: Level
    check: Check  # returns when the rule held, raises Failed or Skipped
    needs_health: bool = False  # looks at the health port
    is_alone: bool = False  # watches gauges or loads the server: nothing else may run

    @property
    def area(self) -> str:
        return self.id.split(".")[0]

    def is_named_by(self, pattern: str) -> bool:
        """Whether ``pattern`` is the id, dotted parts it begins with, or a glob that fits it."""
        return self.id == pattern or self.id.startswith(f"{pattern}.") or fnmatchcase(self.id, pattern)


class Cases:
    """The cases of one module, in the order in which they are written."""

    def __init__(self, page: str, level: Level = "contract") -> None:
        self._page = page
        self._level = level
        self.all: list[Case] = []

    def add(
        self,
        id: str,
        rule: str,
        *,
        page: str | None = None,
        level: Level | None = None,
        needs_health: bool = False,
        is_alone: bool = False,
    ) -> Callable[[Check], Check]:
        """Make a case of a function; ``page`` and ``level`` are the module's unless given."""

        def register(check: Check) -> Check:
            self.all.append(
                Case(
                    id=id,
                    rule=rule,
                    page=page or self._page,
                    level=level or self._level,
                    check=check,
                    needs_health=needs_health,
                    is_alone=is_alone or needs_health,
                )
            )
            return check

        return register

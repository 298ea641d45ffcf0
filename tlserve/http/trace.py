"""How a request is followed by whoever collects traces, as the connection and the handlers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tlserve.http.access import RequestRecord
from tlserve.http.messages import Header, Request

Attribute = str | bool | int | float | Sequence[str]


class Trace(Protocol):
    """One request's trace. It begins when the headers are there and ends with the request's record; the trace of
    a request that is cancelled with its whole server has no end."""

    @property
    def headers(self) -> tuple[Header, ...]:
        """What the answer carries, so that a client can find the trace."""

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        """Add what the handler knows of the request."""

    def add_phase(self, name: str, began: float, ended: float) -> None:
        """Add a part of the request's time; both ends are in trio's time."""

    def end(self, record: RequestRecord) -> None: ...


# Begins the trace of a request whose first byte came at that trio time; None for one that is not to be followed.
BeginTrace = Callable[[Request, float], Trace | None]

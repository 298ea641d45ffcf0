"""Between a request and its trace: what tracing raises ends here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tlserve.http.access import RequestRecord
from tlserve.http.messages import Header, Request
from tlserve.http.trace import Attribute, BeginTrace, Trace
from tlserve.log import LOGGER

REPORT_INTERVAL: Final = 60.0  # seconds
MAX_REASON: Final = 200  # characters of what was raised


class Guard:
    """Begins traces that raise nothing; the log has at most one line a REPORT_INTERVAL of what they would have."""

    def __init__(self, begin: BeginTrace) -> None:
        self._begin = begin
        self._reported_at: float | None = None

    def begin(self, request: Request, began: float) -> Trace | None:
        """The trace of ``request``; None for one that is not followed, or cannot be."""
        with self.contain():
            trace = self._begin(request, began)
            return None if trace is None else _GuardedTrace(trace, self)
        return None

    @contextmanager
    def contain(self) -> Iterator[None]:
        """Ends the block, and nothing else, at any fault in it."""
        try:
            yield
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        now = time.monotonic()
        if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL:
            self._reported_at = now
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            LOGGER.warning("a trace is incomplete", extra={"reason": reason})


class _GuardedTrace:
    """Implements http.trace.Trace on another one."""

    def __init__(self, trace: Trace, guard: Guard) -> None:
        self._trace = trace
        self._guard = guard

    @property
    def headers(self) -> tuple[Header, ...]:
        with self._guard.contain():
            return self._trace.headers
        return ()

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        with self._guard.contain():
            self._trace.describe(attributes)

    def add_phase(self, name: str, began: float, ended: float) -> None:
        with self._guard.contain():
            self._trace.add_phase(name, began, ended)

    def end(self, record: RequestRecord) -> None:
        with self._guard.contain():
            self._trace.end(record)

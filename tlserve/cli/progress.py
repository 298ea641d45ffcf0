"""How far a long command is: a bar on a terminal, a plain line now and then elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

BAR_WIDTH = 30
BAR_INTERVAL = 0.1  # seconds between two drawings of the bar
LINE_INTERVAL = 5.0  # seconds between two plain lines of a stage
_CLEAR = "\r\x1b[K"  # back to the start of the line, and empty it


class Progress:
    """Stages one after the other. A call says what is done, how much of it, and how much there is, None: unknown.

    A context manager whose end takes the bar off the terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval = BAR_INTERVAL if self._is_terminal else LINE_INTERVAL
        self._what = ""
        self._done = 0
        self._total: int | None = None
        self._began = self._shown_at = 0.0

    def __call__(self, what: str, done: int, total: int | None, note: str = "") -> None:
        now = time.monotonic()
        is_new = what != self._what
        self._what, self._done, self._total = what, done, total
        if is_new:
            self._began = now
        if is_new or now - self._shown_at >= self._interval:
            self._shown_at = now
            self._write(f"{what} ..." if is_new and not self._is_terminal else f"{self._amount(now)} {note}".rstrip())

    def advance(self, note: str = "") -> None:
        """One more of the stage is done; ``note`` says how it goes."""
        self(self._what, self._done + 1, self._total, note)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal; something else may be written there now."""
        if self._is_terminal and self._what:
            self._what = ""
            self._write("")

    def _amount(self, now: float) -> str:
        if not self._total:
            return f"{self._what} {self._done}"
        if not self._is_terminal:
            return f"{self._what} {self._done}/{self._total}"
        full = min(BAR_WIDTH, BAR_WIDTH * self._done // self._total)
        bar = "#" * full + "." * (BAR_WIDTH - full)
        return f"{self._what} [{bar}] {100 * self._done // self._total} % {now - self._began:.1f} s"

    def _write(self, text: str) -> None:
        self._stream.write(f"{_CLEAR}{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()

"""How far a long command is: a bar on a terminal, a plain line now and then elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

BAR_WIDTH = 30
BAR_INTERVAL = 0.1  # seconds between two drawings of the bar
LINE_INTERVAL = 10.0  # seconds between two plain lines


class Progress:
    """A context manager; ``total`` is None when nobody knows how much there is to do."""

    def __init__(self, title: str, total: int | None, *, stream: TextIO | None = None) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._note = ""
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval = BAR_INTERVAL if self._is_terminal else LINE_INTERVAL
        self._shown_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")  # back to the start of the line, and empty it
            self._stream.flush()

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more are done; ``note`` says how it goes."""
        self._done += count
        self._note = note
        if time.monotonic() - self._shown_at >= self._interval:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        text = f"{self._title} {self._amount()} {self._note}".rstrip()
        self._stream.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()

    def _amount(self) -> str:
        if not self._total:
            return str(self._done)
        if not self._is_terminal:
            return f"{self._done}/{self._total}"
        full = min(BAR_WIDTH, BAR_WIDTH * self._done // self._total)
        return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {self._done}/{self._total}"

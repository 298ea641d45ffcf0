"""Progress of a start: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30  # characters of the bar
REDRAW = 0.05  # seconds between two pictures of a bar
LINE_INTERVAL = 5.0  # seconds between two lines of a stage that takes long


class StartProgress:
    """Called with what is being done, how much of it is done, and how much there is."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._what = ""
        self._began = 0.0
        self._drawn = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._drawn = what, now, 0.0
            if not self._is_terminal:
                print(f"{what} ...", file=self._out, flush=True)
                self._drawn = now
        is_done = done >= total
        if not self._is_terminal and now - self._drawn > LINE_INTERVAL:
            self._drawn = now
            print(f"{what} {done}/{total}", file=self._out, flush=True)
        if self._is_terminal and (is_done or now - self._drawn > REDRAW):
            self._drawn = now
            filled = WIDTH * done // max(total, 1)
            bar = "#" * filled + "-" * (WIDTH - filled)
            print(
                f"\r{what} [{bar}] {now - self._began:.1f} s", end="\n" if is_done else "", file=self._out, flush=True
            )

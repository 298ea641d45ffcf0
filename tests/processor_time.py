"""How long a piece of work takes this thread's processor."""

from __future__ import annotations

import time
from collections.abc import Callable


def processor_seconds(work: Callable[[], object]) -> float:
    """The least of three runs: memory that a virtual machine gets late from its host counts as this thread's time."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best

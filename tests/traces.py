"""What a server could leave behind in a process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import trio

LINGERING = 10.0  # seconds; the last connections, and threads that have just done their work, take a moment


@dataclass(frozen=True)
class Traces:
    """Threads, open files and tasks of this process, and the settings that all of it shares."""

    threads: Counter[str]
    files: Counter[str]
    num_tasks: int
    handlers: dict[str, object]
    interpreter: dict[str, object]

    @classmethod
    def now(cls) -> Traces:
        # trio keeps threads that have nothing to do for some seconds, under this name
        names = (thread.name for thread in threading.enumerate())
        threads = Counter(name for name in names if not name.startswith("Trio thread"))
        try:
            num_tasks = trio.lowlevel.current_statistics().tasks_living
        except RuntimeError:
            num_tasks = 0  # outside trio
        handlers: dict[str, object] = {
            number.name: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        interpreter: dict[str, object] = {
            "switch interval": sys.getswitchinterval(),
            "thresholds of gc": gc.get_threshold(),
        }
        return cls(threads, Counter(_open_files()), num_tasks, handlers, interpreter)


async def settled() -> Traces:
    """Traces that stay: what an earlier test has left to garbage or to a thread that ends is not among them."""
    with trio.fail_after(LINGERING):
        gc.collect()
        last = Traces.now()
        while True:
            await trio.sleep(0.05)
            now = Traces.now()
            if now == last:
                return now
            last = now


async def wait_until_they_are(before: Traces, *, collect: bool = False) -> None:
    """``collect``: what only garbage holds may be collected first."""
    with trio.move_on_after(LINGERING):
        while Traces.now() != before:
            await trio.sleep(0.01)
            if collect:
                gc.collect()
    assert Traces.now() == before


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # of the listing itself

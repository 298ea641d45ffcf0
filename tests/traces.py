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
        gc.collect()  # a file that only garbage holds is not left behind
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

    def since(self, before: Traces) -> list[str]:
        """What is there now and was not before. What has gone meanwhile was left by something else."""
        added = [*(self.threads - before.threads), *(self.files - before.files)]
        if self.num_tasks > before.num_tasks:
            added.append(f"{self.num_tasks - before.num_tasks} tasks")
        settings = before.handlers | before.interpreter
        changed = [
            f"{name}: {value}" for name, value in (self.handlers | self.interpreter).items() if value != settings[name]
        ]
        return sorted(added + changed)


async def wait_until_nothing_is_left(before: Traces) -> None:
    with trio.move_on_after(LINGERING):
        while Traces.now().since(before):  # noqa: ASYNC110 nothing tells of a descriptor that is closed
            await trio.sleep(0.01)
    assert Traces.now().since(before) == []


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # of the listing itself

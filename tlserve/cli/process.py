"""What a serving process asks of the system: a stderr that may be lost, and room for its connections."""

from __future__ import annotations

import io
import os
import resource
import sys

from tlserve.http.limits import MAX_REFUSALS
from tlserve.log import LOGGER

OWN_FILES = 256  # descriptors beside those of connections: model files, listeners, the event loop's
STDERR = 2


class _Lossy(io.FileIO):
    """A file that takes everything; what cannot be written is gone."""

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # FileIO says bytes-like, in words of its own
        try:
            return super().write(view) or len(view)  # None: a pipe that is full and does not block
        except OSError:
            return len(view)


def survive_lost_stderr() -> None:
    """Whoever reads stderr may go away, and a process may be started without one: neither is a reason to end."""
    if sys.stderr is not sys.__stderr__:
        return  # somebody has taken it over and gets what is written
    if sys.stderr is None:
        # Without this the first socket would be descriptor 2, and get what C code writes there.
        null = os.open(os.devnull, os.O_WRONLY)
        if null != STDERR:
            os.dup2(null, STDERR)
            os.close(null)
    raw = _Lossy(STDERR, "wb", closefd=False)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)


def needed_files(num_connections: int) -> int:
    """Open files that so many connections come to, with all that the process has open beside them."""
    return num_connections + MAX_REFUSALS + OWN_FILES


def make_room_for(num_connections: int) -> None:
    """Raise the soft limit of open files so that many connections fit; say so where the hard limit is in the way."""
    needed = needed_files(num_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        LOGGER.warning(
            "max_connections needs more open files than the limit allows", extra={"needed": needed, "limit": allowed}
        )

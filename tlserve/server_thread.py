"""A server on a thread of its own, for programs that know nothing of trio."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import trio

from tlserve.config import ServeConfig
from tlserve.loading import Progress, silent
from tlserve.server import Server, serve


class ServerHandle:
    """A running server, as ``spawn`` gives it. As a context manager it drains and joins at the end."""

    def __init__(self, server: Server, token: trio.lowlevel.TrioToken, thread: threading.Thread) -> None:
        self.http_addr = server.http_addr
        self.health_addr = server.health_addr
        self.base_url = server.base_url
        self._server = server
        self._token = token
        self._thread = thread
        self._ended: queue.Queue[BaseException | None] = queue.Queue()  # how the server ended, once it has

    def drain(self) -> None:
        """Stop taking requests; those in flight finish. Returns at once; idempotent."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._server.drain)

    def join(self) -> None:
        """Wait until the server has ended; raises EngineDied when a fault ended it."""
        error = self._ended.get()
        self._ended.put(error)
        self._thread.join()
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drain()
        self.join()


def spawn(config: ServeConfig, *, progress: Progress = silent) -> ServerHandle:
    """Start a server on a thread of its own and return when it is ready. It handles no signals.

    ``progress`` is called in yet another thread with what is being done, how much of it, and of how much.
    Raises what ``serve`` raises when it cannot start.
    """
    started: queue.Queue[ServerHandle | BaseException] = queue.Queue()
    config = replace(config, handle_signals=False)
    # A daemon, so that a program which forgets its server ends instead of hanging.
    thread = threading.Thread(target=_serve_in_thread, args=(config, progress, started), name="tlserve", daemon=True)
    thread.start()
    result = started.get()
    if isinstance(result, BaseException):
        thread.join()
        raise result
    return result


def _serve_in_thread(
    config: ServeConfig, progress: Progress, started: queue.Queue[ServerHandle | BaseException]
) -> None:
    handle: ServerHandle | None = None

    async def main() -> None:
        nonlocal handle
        async with serve(config, progress=progress) as server:
            handle = ServerHandle(server, trio.lowlevel.current_trio_token(), threading.current_thread())
            started.put(handle)
            await server.wait_drain()

    failure: BaseException | None = None
    try:
        trio.run(main)
    except BaseException as error:
        failure = error
    if handle is None:
        assert failure is not None
        started.put(failure)
    else:
        handle._ended.put(failure)

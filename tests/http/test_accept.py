"""Accepting goes on when the machine has no room for a connection, and says so once."""

from __future__ import annotations

import errno
import logging

import pytest
import trio
import trio.testing

from tests.http.client import RENDERER, Handlers, MemoryListener, RawClient, get
from tlserve.http.limits import ACCEPT_PAUSE, COMPLAINT_INTERVAL, Limits
from tlserve.http.serve import HttpServer


class FullListener(MemoryListener):
    """Raises ``error`` for as long as there is one."""

    def __init__(self, error: OSError | None) -> None:
        super().__init__()
        self.error = error

    async def accept(self) -> trio.abc.Stream:
        if self.error is not None:
            raise self.error
        return await super().accept()


async def test_a_shortage_is_one_line_and_ends_by_itself(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = Handlers()
    server = HttpServer(handlers.router(), RENDERER, Limits(), name="api")
    listener = FullListener(OSError(errno.EMFILE, "too many"))
    client = RawClient(listener.connect())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, [listener])
        await trio.sleep(10 * COMPLAINT_INTERVAL)
        assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
            (logging.WARNING, "api: no room for more connections: Too many open files")
        ]
        listener.error = None
        await client.send(get("/healthz"))
        assert (await client.response()).status == 200
        await client.stream.aclose()
        await trio.sleep(COMPLAINT_INTERVAL)
        listener.error = OSError(errno.ENFILE, "too many")
        listener.connect()  # wakes the one that waits; the next call fails
        await trio.sleep(10 * ACCEPT_PAUSE)
        assert len(caplog.records) == 2
        server.drain()


async def test_a_broken_listener_is_an_error() -> None:
    server = HttpServer(Handlers().router(), RENDERER, Limits(), name="api")
    with pytest.raises(ExceptionGroup) as caught:
        await server.serve([FullListener(OSError(errno.EBADF, "bad file"))])
    assert caught.group_contains(OSError, match="bad file")
    assert server.ended.is_set()

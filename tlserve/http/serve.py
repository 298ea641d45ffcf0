"""A server: listeners, the connections they bring, and how all of them end."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from tlserve.errors import ApiError, NoCapacity, ShuttingDown
from tlserve.http.access import RequestRecord
from tlserve.http.bodies import Bodies
from tlserve.http.connection import Connection, Service
from tlserve.http.limits import ACCEPT_PAUSE, COMPLAINT_INTERVAL, MAX_REFUSALS, Limits
from tlserve.http.messages import Check, ErrorRenderer, Handler, Header, HeadersFor, Request
from tlserve.http.trace import BeginTrace

logger: Final = logging.getLogger("tlserve.http")

# What accept(2) reports when it is the machine that has no room, and later may have some.
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

Listener = trio.abc.Listener[Any]  # of any trio.abc.Stream: sockets, TLS over them, memory


class HttpServer:
    """Serves HTTP/1.1 and 1.0 on any listeners of trio streams.

    ``handler`` is called for each request; ``check`` sees a request before its body is read and may raise
    the ApiError that refuses it; ``headers_for`` gives the headers that all answers to a request carry, unless
    it was too malformed to be one; ``on_finish`` is called, synchronously, with the record of each request;
    ``begin_trace`` begins the trace of a request when its headers are there.
    ``name`` tells servers of one process apart in logs and records.
    """

    def __init__(
        self,
        handler: Handler,
        errors: ErrorRenderer,
        limits: Limits,
        *,
        name: str,
        check: Check | None = None,
        headers_for: HeadersFor | None = None,
        on_finish: Callable[[RequestRecord], None] | None = None,
        begin_trace: BeginTrace | None = None,
    ) -> None:
        self._service = Service(
            name,
            handler,
            errors,
            limits,
            Bodies(limits.max_bodies_bytes),
            check or _admit_all,
            headers_for or _no_headers,
            on_finish or _forget,
            begin_trace,
        )
        self._connections: set[Connection] = set()
        self._accepting = trio.CancelScope()
        self._refusal: ApiError | None = None
        self._complaint_due = -math.inf  # trio time from which a lack of room is news
        self.ended = trio.Event()  # set when ``serve`` returns

    def __repr__(self) -> str:
        state = "serving" if self._refusal is None else "draining"
        return f"<HttpServer {self._service.name}, {state}, {self.num_connections} connections>"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def serve(
        self,
        listeners: Sequence[Listener],
        *,
        task_status: trio.TaskStatus[list[Listener]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves until ``drain`` has been called and the last connection has ended.

        Resource handling: the listeners are closed when this returns, or when ``drain`` is called.
        Error handling: a fault in a connection is logged and ends that connection alone. Accepting goes on
        when the process is out of file descriptors; other errors of a listener are raised.
        Cancellation handling: closes everything at once, in-flight requests included.
        """
        try:
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    async with trio.open_nursery() as accepting:
                        for listener in listeners:
                            accepting.start_soon(self._accept, listener, nursery)
                        task_status.started(list(listeners))
        finally:
            self.ended.set()

    def drain(self) -> None:
        """Closes listeners and idle connections, lets answers under way finish, refuses later requests.

        Synchronous and idempotent. A request that has begun to arrive gets REFUSAL_TIMEOUT to arrive, and 503.
        """
        if self._refusal is None:
            self._refusal = ShuttingDown("the server is shutting down")
            self._accepting.cancel()
            for connection in self._connections:
                connection.refuse(self._refusal)

    def cut(self) -> None:
        """Drains, and ends the answers under way with an error; for when the time to drain is over."""
        self.drain()
        assert self._refusal is not None
        for connection in self._connections:
            connection.cut(self._refusal)

    async def _accept(self, listener: Listener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    self._complain(error.errno)
                    await trio.sleep(ACCEPT_PAUSE)
                else:
                    nursery.start_soon(self._serve_stream, stream)

    def _complain(self, number: int) -> None:
        """One line for a shortage, however many times it is met before COMPLAINT_INTERVAL have passed without it."""
        now = trio.current_time()
        if now >= self._complaint_due:
            logger.warning("%s: no room for more connections: %s", self._service.name, os.strerror(number))
        self._complaint_due = now + COMPLAINT_INTERVAL

    async def _serve_stream(self, stream: trio.abc.Stream) -> None:
        try:
            await self._serve_connection(stream)
        finally:
            await trio.aclose_forcefully(stream)

    async def _serve_connection(self, stream: trio.abc.Stream) -> None:
        limit = self._service.limits.max_connections
        if self.num_connections >= limit + MAX_REFUSALS:
            return
        connection = Connection(stream, self._service)
        if self._refusal is not None:
            connection.refuse(self._refusal)
        elif self.num_connections >= limit:
            connection.refuse(NoCapacity(f"{limit} connections are open"))
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


def _admit_all(request: Request) -> None:
    pass


def _no_headers(request: Request) -> tuple[Header, ...]:
    return ()


def _forget(record: RequestRecord) -> None:
    pass

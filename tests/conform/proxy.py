"""A proxy that tells one lie: it stands before a real server and breaks one rule of what passes through it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from tlserve.conform.subject import Target
from tlserve.http.client import Origin, connect
from tlserve.http.limits import Limits
from tlserve.http.messages import Header, Reply, Request, Response
from tlserve.http.serve import HttpServer
from tlserve.openai.errors import ERRORS

# Set by the proxy's own connection, or no longer true of a body that was changed.
HOP_HEADERS = {"content-length", "transfer-encoding", "connection", "date", "x-request-id", "host", "expect"}
LONG_ANSWER = 1000  # tokens above which an answer is there to be left, not to be read
LIMITS = Limits(header_timeout=2.0)  # for who waits for the 408


@dataclass
class Exchange:
    """One request and its answer, both of which a lie may change."""

    method: str
    path: str
    headers: list[Header]
    sent: bytes
    status: int = 0
    reply_headers: list[Header] = field(default_factory=list)
    body: bytes = b""

    @property
    def asked(self) -> dict[str, Any]:
        """The request's document; {} where it is none."""
        try:
            document = json.loads(self.sent)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    @property
    def is_long(self) -> bool:
        length = self.asked.get("max_tokens")
        return isinstance(length, int) and length > LONG_ANSWER

    @property
    def is_about_now(self) -> bool:
        """Whether it is the state of the server that matters: of its gauges, its queue, its running requests."""
        return self.is_long or not self.path.startswith("/v1")

    @property
    def is_stream(self) -> bool:
        return self.header("content-type").startswith("text/event-stream")

    def header(self, name: str) -> str:
        return next((value for key, value in self.reply_headers if key == name), "")

    def set_header(self, name: str, value: str | None) -> None:
        self.reply_headers = [(key, old) for key, old in self.reply_headers if key != name]
        if value is not None:
            self.reply_headers.append((name, value))

    def change(self, change: Callable[[Any], None]) -> None:
        """Change the document of the answer, or each document of a stream, in place."""
        if self.is_stream:
            self.body = b"".join(self._changed(frame, change) for frame in self.body.split(b"\n\n") if frame)
        else:
            document = json.loads(self.body)
            change(document)
            self.body = json.dumps(document).encode()

    @staticmethod
    def _changed(frame: bytes, change: Callable[[Any], None]) -> bytes:
        data = frame.removeprefix(b"data: ")
        if data != b"[DONE]":
            document = json.loads(data)
            change(document)
            data = json.dumps(document).encode()
        return b"data: " + data + b"\n\n"


def _nothing(exchange: Exchange) -> None: ...


@dataclass(frozen=True)
class Lie:
    """``ask`` changes requests on their way in, ``tell`` answers on their way out, ``raw`` the bytes of all answers."""

    ask: Callable[[Exchange], None] = _nothing
    tell: Callable[[Exchange], None] = _nothing
    raw: Callable[[bytes], bytes] | None = None
    outlives: Callable[[Exchange], bool] = lambda exchange: False  # whose request goes on when the client leaves


Recording = tuple[int, list[Header], bytes]
Recordings = dict[Hashable, list[Recording]]  # of a request, the answers to its first, second, ... time in a run


class Proxy:
    """Handles requests of one port by asking the same port of the real server.

    What the server has answered in an earlier run is not asked again: the nth time of a request in this run gets the
    answer to its nth time in the first. That is what makes dozens of lies affordable.
    """

    def __init__(self, origin: Origin, lie: Lie, recordings: Recordings, nursery: trio.Nursery) -> None:
        self._origin = origin
        self._lie = lie
        self._recordings = recordings
        self._num_asked: Counter[Hashable] = Counter()
        self._nursery = nursery

    async def __call__(self, request: Request, reply: Reply) -> None:
        path = request.raw_path or request.path
        headers = [pair for pair in request.headers if pair[0] not in HOP_HEADERS]
        exchange = Exchange("GET" if request.method == "HEAD" else request.method, path, headers, request.body)
        self._lie.ask(exchange)
        if self._lie.outlives(exchange):
            ended = trio.Event()
            self._nursery.start_soon(self._go_on, exchange, ended)
            await ended.wait()
        elif exchange.is_long and exchange.asked.get("stream"):
            await self._pass_on(exchange, reply)
            return
        else:
            await self._ask(exchange)
        if exchange.body and exchange.status != 0:
            self._lie.tell(exchange)
        if exchange.is_stream:
            await reply.start(exchange.status, tuple(exchange.reply_headers))
            await reply.write(exchange.body)
        else:
            await reply.send(Response(exchange.status, exchange.body, tuple(exchange.reply_headers)))

    async def _go_on(self, exchange: Exchange, ended: trio.Event) -> None:
        await self._ask(exchange)
        ended.set()

    async def _ask(self, exchange: Exchange) -> None:
        key = (self._origin, exchange.method, exchange.path, tuple(exchange.headers), exchange.sent)
        recordings = self._recordings.setdefault(key, [])
        number = self._num_asked[key]
        self._num_asked[key] += 1
        if number < len(recordings) and not exchange.is_about_now:
            exchange.status, headers, exchange.body = recordings[number]
            exchange.reply_headers = list(headers)
            return
        async with self._asked(exchange) as connection:
            exchange.body = await connection.read_all()
        recordings.append((exchange.status, list(exchange.reply_headers), exchange.body))

    async def _pass_on(self, exchange: Exchange, reply: Reply) -> None:
        async with self._asked(exchange) as connection:
            await reply.start(exchange.status, tuple(exchange.reply_headers))
            while piece := await connection.read():
                await reply.write(piece)

    @asynccontextmanager
    async def _asked(self, exchange: Exchange) -> AsyncIterator[Any]:
        connection = await connect(self._origin)
        try:
            exchange.status = await connection.request(
                exchange.method, exchange.path, tuple(exchange.headers), exchange.sent
            )
            exchange.reply_headers = [pair for pair in connection.headers if pair[0] not in HOP_HEADERS]
            yield connection
        finally:
            await connection.aclose()


@dataclass
class LyingStream(trio.abc.HalfCloseableStream):
    stream: trio.SocketStream
    raw: Callable[[bytes], bytes]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(self.raw(bytes(data)))

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()


@dataclass
class LyingListener(trio.abc.Listener[trio.abc.HalfCloseableStream]):
    listener: trio.SocketListener
    raw: Callable[[bytes], bytes]

    async def accept(self) -> LyingStream:
        return LyingStream(await self.listener.accept(), self.raw)

    async def aclose(self) -> None:
        await self.listener.aclose()


@asynccontextmanager
async def lying(target: Target, lie: Lie, recordings: Recordings) -> AsyncIterator[Target]:
    """The same server, seen through a proxy with that lie on both its ports."""
    assert target.health is not None
    async with trio.open_nursery() as nursery:
        api = await _serve(nursery, target.root, lie, recordings)
        health = await _serve(nursery, target.health, lie, recordings)
        yield replace(target, api=replace(target.api, port=api), health=replace(target.health, port=health))
        nursery.cancel_scope.cancel()


async def _serve(nursery: trio.Nursery, origin: Origin, lie: Lie, recordings: Recordings) -> int:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    heard = listener if lie.raw is None else LyingListener(listener, lie.raw)
    server = HttpServer(Proxy(origin, lie, recordings, nursery), ERRORS, LIMITS, name="proxy")
    await nursery.start(server.serve, [heard])
    return port

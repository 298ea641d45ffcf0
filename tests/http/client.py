"""A server in memory or on a socket, and a client that sees every byte of its answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import trio
import trio.testing

from tlserve.errors import ApiError, InvalidRequest
from tlserve.http import sse
from tlserve.http.access import RequestRecord
from tlserve.http.limits import Limits
from tlserve.http.messages import ErrorRenderer, Reply, Request, Response
from tlserve.http.router import Router
from tlserve.http.serve import HttpServer

HOST = b"Host: test\r\n"


def get(path: str, *headers: str) -> bytes:
    return build("GET", path, *headers)


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    return build("POST", path, f"Content-Length: {len(body)}", *headers) + body


def build(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@dataclass(frozen=True)
class RawResponse:
    version: str
    status: int
    headers: tuple[tuple[str, str], ...]  # names in lower case
    body: bytes

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, values
        return values[0] if values else None


class RawClient:
    """Sends any bytes; parses answers by the letter of RFC 9112."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.received = bytearray()

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def response(self, *, to_head: bool = False) -> RawResponse:
        """Reads one response, which must be complete; ``to_head`` when the request was HEAD."""
        version, status, headers = await self.response_head()
        fields = dict(headers)
        if to_head or status in (100, 204):
            body = b""
        elif fields.get("transfer-encoding") == "chunked":
            assert "content-length" not in fields
            body = await self._chunked_body()
        elif "content-length" in fields:
            body = await self.exactly(int(fields["content-length"]))
        else:
            assert fields["connection"] == "close"
            body = await self.rest()
        return RawResponse(version, status, headers, body)

    async def response_head(self) -> tuple[str, int, tuple[tuple[str, str], ...]]:
        start, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1")[:-4].split("\r\n")
        version, status, _ = start.split(" ", 2)
        headers = tuple((name.lower(), value) for name, value in (line.split(": ", 1) for line in lines))
        return version, int(status), headers

    async def until(self, mark: bytes) -> bytes:
        while (found := self.received.find(mark)) < 0:
            await self._receive()
        return await self.exactly(found + len(mark))

    async def exactly(self, count: int) -> bytes:
        while len(self.received) < count:
            await self._receive()
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken

    async def rest(self) -> bytes:
        """Everything up to the end of the connection, which must come."""
        with contextlib.suppress(EOFError):
            while True:
                await self._receive()
        return await self.exactly(len(self.received))

    async def _chunked_body(self) -> bytes:
        body = b""
        while size := int(await self.until(b"\r\n"), 16):
            body += await self.exactly(size)
            assert await self.exactly(2) == b"\r\n"
        assert await self.exactly(2) == b"\r\n"
        return body

    async def _receive(self) -> None:
        data = await self.stream.receive_some()
        if not data:
            raise EOFError(f"the connection ended after {bytes(self.received)!r}")
        self.received += data


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts the streams that ``connect`` makes."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](1000)

    def connect(self, *, is_clogged: bool = False) -> trio.abc.Stream:
        """The client's end; ``is_clogged`` has no buffer, so that a write waits until it is read."""
        pair = trio.testing.lockstep_stream_pair() if is_clogged else trio.testing.memory_stream_pair()
        self.take(pair[0])
        return pair[1]

    def take(self, stream: trio.abc.Stream) -> None:
        """Have a stream accepted whose other end the test has."""
        self._send.send_nowait(stream)

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await self._receive.aclose()


@dataclass
class App:
    """The server under test, and what its handlers and its log have seen."""

    server: HttpServer
    listener: MemoryListener
    requests: list[Request]
    records: list[RequestRecord]
    num_running: Callable[[], int]  # handlers that take their time and have not ended

    def connect(self, *, is_clogged: bool = False) -> RawClient:
        return RawClient(self.listener.connect(is_clogged=is_clogged))

    async def exchange(self, data: bytes) -> bytes:
        """Everything that is answered to ``data`` until the server closes, or has been quiet for a minute."""
        client = self.connect()
        await client.send(data)
        with trio.move_on_after(60):
            return await client.rest()
        return bytes(client.received)


@dataclass
class Handlers:
    """One handler for each thing that can happen to a request."""

    requests: list[Request] = field(default_factory=list)
    num_running: int = 0

    def router(self) -> Router:
        router = Router()
        router.add("GET", "/healthz", self.health)
        router.add("GET", "/v1/models/{id:path}", self.model)
        router.add("POST", "/echo", self.echo)
        router.add("POST", "/sleep", self.sleep)
        router.add("POST", "/stream", self.stream)
        router.add("POST", "/forever", self.forever)
        router.add("POST", "/stream-forever", self.stream_forever)
        router.add("POST", "/flood", self.flood)
        router.add("POST", "/write-in-cleanup", self.write_in_cleanup)
        router.add("POST", "/refuse", self.refuse)
        router.add("POST", "/refuse-late", self.refuse_late)
        router.add("POST", "/bug", self.bug)
        router.add("POST", "/bug-late", self.bug_late)
        router.add("POST", "/bug-beside-refusal", self.bug_beside_refusal)
        router.add("POST", "/bug-in-cleanup", self.bug_in_cleanup)
        router.add("POST", "/silent", self.silent)
        return router

    async def health(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        await reply.send(Response(200, b'{"status":"ok"}'))

    async def model(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        await reply.send(Response(200, request.path_params["id"].encode()))

    async def echo(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        await reply.send(Response(200, request.body))

    async def sleep(self, request: Request, reply: Reply) -> None:
        """Answers after as many seconds as the body says."""
        with self._running():
            await trio.sleep(float(request.body))
        await reply.send(Response(200, request.body))

    async def stream(self, request: Request, reply: Reply) -> None:
        """Two events, then the body again, then the end."""
        await reply.start(200, sse.SSE_HEADERS)
        for payload in (b"1", b"2", request.body):
            await reply.write(sse.event(payload))
        await reply.write(sse.DONE)

    async def forever(self, request: Request, reply: Reply) -> None:
        with self._running():
            await trio.sleep_forever()

    async def stream_forever(self, request: Request, reply: Reply) -> None:
        """An event of a kibibyte each second."""
        with self._running():
            await reply.start(200, sse.SSE_HEADERS)
            while True:
                await reply.write(sse.event(b"x" * 1024))
                await trio.sleep(1)

    async def flood(self, request: Request, reply: Reply) -> None:
        """As much as the client takes."""
        with self._running():
            await reply.start(200, ())
            while True:
                await reply.write(b"x" * 50_000)

    async def write_in_cleanup(self, request: Request, reply: Reply) -> None:
        with self._running():
            await reply.start(200, sse.SSE_HEADERS)
            try:
                await trio.sleep_forever()
            finally:
                await reply.write(sse.DONE)

    async def refuse(self, request: Request, reply: Reply) -> None:
        raise InvalidRequest("temperature must be between 0 and 2, got 3", param="temperature")

    async def refuse_late(self, request: Request, reply: Reply) -> None:
        """An ApiError out of a nursery, after the stream has begun."""
        await reply.start(200, sse.SSE_HEADERS)
        async with trio.open_nursery():
            raise InvalidRequest("too late")

    async def bug(self, request: Request, reply: Reply) -> None:
        raise ZeroDivisionError("secret")

    async def bug_late(self, request: Request, reply: Reply) -> None:
        await reply.start(200, sse.SSE_HEADERS)
        await reply.write(sse.event(b"1"))
        raise ZeroDivisionError("secret")

    async def bug_beside_refusal(self, request: Request, reply: Reply) -> None:
        raise ExceptionGroup("two at once", [InvalidRequest("no"), ZeroDivisionError("secret")])

    async def bug_in_cleanup(self, request: Request, reply: Reply) -> None:
        try:
            with self._running():
                await trio.sleep_forever()
        finally:
            raise ZeroDivisionError("secret")

    async def silent(self, request: Request, reply: Reply) -> None:
        await trio.lowlevel.checkpoint()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


def render(error: ApiError) -> Response:
    body = f"{error.code or error.kind}: {error.message}".encode()
    return Response(error.status, body, (("Content-Type", "text/plain"), *error.headers))


def render_event(error: ApiError) -> bytes:
    return sse.event(f'{{"error":"{error.code or error.kind}"}}'.encode())


RENDERER = ErrorRenderer(render, render_event)


@contextlib.asynccontextmanager
async def serving(limits: Limits | None = None) -> AsyncIterator[App]:
    """A server on memory streams. Leaving the block cancels what is left of it."""
    handlers = Handlers()
    router = handlers.router()
    records: list[RequestRecord] = []
    server = HttpServer(router, RENDERER, limits or Limits(), name="api", check=router.check, on_finish=records.append)
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, [listener])
        yield App(server, listener, handlers.requests, records, lambda: handlers.num_running)
        nursery.cancel_scope.cancel()

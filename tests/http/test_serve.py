"""The same server on real sockets and on TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio

from tests.http.client import RENDERER, Handlers, RawClient, build, get, post
from tlserve.http.access import Outcome, RequestRecord
from tlserve.http.limits import REFUSAL_TIMEOUT, Limits
from tlserve.http.serve import HttpServer

# A certificate for localhost and its key, signed by itself, for these tests alone.
PEM = Path(__file__).with_name("localhost.pem")


class SocketApp:
    def __init__(self, limits: Limits, *, is_tls: bool) -> None:
        self.handlers = Handlers()
        self.records: list[RequestRecord] = []
        router = self.handlers.router()
        self.server = HttpServer(
            router, RENDERER, limits, name="api", check=router.check, on_finish=self.records.append
        )
        self.is_tls = is_tls
        self.port = 0

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners: list[trio.SocketListener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        if self.is_tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(PEM)
            await self.server.serve([trio.SSLListener(listener, context) for listener in listeners])
        else:
            await self.server.serve(listeners)

    async def connect_socket(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[RawClient]:
        stream: trio.abc.Stream = await self.connect_socket()
        if self.is_tls:
            context = ssl.create_default_context(cafile=str(PEM))
            assert isinstance(stream, trio.SocketStream)
            stream = trio.SSLStream(stream, context, server_hostname="localhost")
        try:
            yield RawClient(stream)
        finally:
            await trio.aclose_forcefully(stream)

    async def until_empty(self) -> None:
        await until(lambda: self.server.num_connections == 0)


@contextlib.asynccontextmanager
async def serving(limits: Limits | None = None, *, is_tls: bool = False) -> AsyncIterator[SocketApp]:
    app = SocketApp(limits or Limits(), is_tls=is_tls)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(app.serve)
            yield app
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Polls: what a kernel does between two sockets sets no event of ours."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.001)


def reset(stream: trio.SocketStream) -> None:
    """Closes with RST instead of FIN."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_requests_and_streams_are_answered(is_tls: bool) -> None:
    async with serving(is_tls=is_tls) as app, app.connect() as client:
        await client.send(get("/healthz") + post("/stream", b"3"))
        assert (await client.response()).status == 200
        assert (await client.response()).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_b011_a_client_that_leaves_is_noticed(is_tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(is_tls=is_tls) as app:
        async with app.connect() as client:
            await client.send(post("/forever"))
            await until(lambda: app.handlers.num_running == 1)
        await app.until_empty()
        assert app.handlers.num_running == 0
        assert [record.outcome for record in app.records] == [Outcome.CLIENT_LEFT]
        assert caplog.records == []


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_a_drain_ends_idle_connections_and_then_the_server(is_tls: bool) -> None:
    async with serving(is_tls=is_tls) as app, app.connect() as idle, app.connect() as busy:
        await idle.send(get("/healthz"))
        await idle.response()
        await busy.send(post("/sleep", b"0.2"))
        await until(lambda: len(app.records) == 1 and app.handlers.num_running == 1)
        app.server.drain()
        assert await idle.rest() == b""
        assert (await busy.response()).header("connection") == "close"
        with pytest.raises(OSError, match="connect"):
            await app.connect_socket()


@pytest.mark.parametrize("length", range(0, len(post("/stream-forever", b"x")) + 1, 9))
async def test_a_reset_at_any_byte_leaves_nothing_behind(length: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as app:
        stream = await app.connect_socket()
        await stream.send_all(post("/stream-forever", b"x")[:length])
        await until(lambda: app.server.num_connections == 1)
        reset(stream)
        await app.until_empty()
        assert app.handlers.num_running == 0
        assert caplog.records == []


async def test_b021_a_client_that_sends_everything_first_can_read_its_413_and_memory_stays_flat() -> None:
    size = 100_000_000
    async with serving(Limits(max_body_bytes=100_000)) as app, app.connect() as client:
        tracemalloc.start()
        try:
            await client.send(build("POST", "/echo", f"Content-Length: {size}"))
            block = bytes(1_000_000)
            for _ in range(size // len(block)):
                await client.send(block)
            response = await client.response()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (response.status, response.header("connection")) == (413, "close")
        assert await client.rest() == b""
        assert peak < 4_000_000


async def test_a_client_that_does_not_read_meets_the_write_deadline() -> None:
    async with serving(Limits(write_timeout=0.1, max_body_bytes=50_000_000)) as app, app.connect() as client:
        await client.send(post("/echo", bytes(40_000_000)))
        await app.until_empty()
        assert [record.outcome for record in app.records] == [Outcome.WRITE_TIMEOUT]


async def test_nothing_is_sent_behind_a_write_that_was_cut() -> None:
    """What the client can still read is a body without an end, never a chunk inside another."""
    async with serving() as app, app.connect() as client:
        await client.send(post("/flood"))
        await until(lambda: app.handlers.num_running == 1)
        await trio.sleep(0.05)
        app.server.cut()
        await until(lambda: app.handlers.num_running == 0)
        _, status, _ = await client.response_head()
        body = await client.rest()
        assert status == 200
        chunk = b"c350\r\n" + b"x" * 50_000 + b"\r\n"
        whole, rest = divmod(len(body), len(chunk))
        assert body == chunk * whole + chunk[:rest]


async def test_a_handshake_that_does_not_end_meets_the_header_deadline() -> None:
    async with serving(Limits(header_timeout=0.1), is_tls=True) as app:
        stream = await app.connect_socket()
        await stream.send_all(b"\x16\x03\x01")
        assert await stream.receive_some() == b""
        await stream.aclose()


async def test_a_handshake_that_does_not_end_cannot_hold_up_a_drain() -> None:
    async with serving(is_tls=True) as app:
        stream = await app.connect_socket()
        await until(lambda: app.server.num_connections == 1)
        app.server.drain()
        began = trio.current_time()
        await app.server.ended.wait()
        assert trio.current_time() - began < 2 * REFUSAL_TIMEOUT
        await stream.aclose()


async def test_plain_http_on_a_tls_port_is_closed_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(is_tls=True) as app:
        stream = await app.connect_socket()
        await stream.send_all(get("/healthz"))
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        await app.until_empty()
        await stream.aclose()
        assert caplog.records == []

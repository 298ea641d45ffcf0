"""Who ends what: clients that leave at any moment, drain, cut and cancellation."""

from __future__ import annotations

import contextlib

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import App, RawClient, build, get, post, serving
from tlserve.http.access import Outcome
from tlserve.http.limits import LINGER_QUIET, LINGER_TIMEOUT, REFUSAL_TIMEOUT, Limits


async def start(app: App, data: bytes) -> RawClient:
    """A client whose request has come as far as it goes by itself."""
    client = app.connect()
    await client.send(data)
    await wait_all_tasks_blocked()
    return client


@pytest.mark.parametrize("path", ["/forever", "/stream-forever"])
async def test_b011_a_client_that_leaves_ends_its_handler_at_once(autojump_clock: MockClock, path: str) -> None:
    async with serving() as app:
        client = await start(app, post(path))
        assert app.num_running() == 1
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.num_running() == 0
        assert app.server.num_connections == 0
        assert [record.outcome for record in app.records] == [Outcome.CLIENT_LEFT]


async def test_b012_a_client_that_leaves_is_noticed_behind_bytes_it_sent_ahead(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = await start(app, post("/forever") + get("/healthz") * 100)
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.num_running() == 0
        assert app.server.num_connections == 0
        assert app.requests == []


async def test_a_bug_in_the_cleanup_of_a_handler_is_logged_and_ends_nothing_else(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as app:
        leaving, cancelled = [await start(app, post("/bug-in-cleanup")) for _ in range(2)]
        await leaving.stream.aclose()
        await wait_all_tasks_blocked()
        assert [record.exc_info is not None for record in caplog.records] == [True]
        assert app.num_running() == 1
    assert await cancelled.rest() == b""
    assert len(caplog.records) == 2


@pytest.mark.parametrize("length", range(0, len(post("/forever", b"xyz")) + 1, 7))
async def test_a_client_may_leave_at_any_byte_of_a_request(
    autojump_clock: MockClock, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as app:
        client = await start(app, post("/forever", b"xyz")[:length])
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.server.num_connections == 0
        assert app.num_running() == 0
        assert caplog.records == []
        assert trio.current_time() == 0


async def test_a_request_whose_sender_has_already_left_is_not_served(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post("/stream", b"3"))
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.server.num_connections == 0
        assert [record.outcome for record in app.records] == [Outcome.CLIENT_LEFT]


async def test_a_refused_client_that_goes_on_sending_can_read_why(autojump_clock: MockClock) -> None:
    """Input is read and thrown away until the client stops, so that no reset destroys the answer."""
    async with serving(Limits(max_body_bytes=1000)) as app:
        client = app.connect()
        await client.send(build("POST", "/echo", "Content-Length: 1000000"))
        for _ in range(10):
            await client.send(b"x" * 100_000)
            await trio.sleep(LINGER_QUIET / 2)
        assert (await client.response()).status == 413
        assert await client.rest() == b""
        await trio.sleep(LINGER_QUIET + 1)
        assert app.server.num_connections == 0


async def test_lingering_has_an_end(autojump_clock: MockClock) -> None:
    async with serving(Limits(max_body_bytes=1000)) as app:
        client = app.connect()
        await client.send(build("POST", "/echo", "Content-Length: 1000000"))
        await client.response()
        while app.server.num_connections:
            with contextlib.suppress(trio.BrokenResourceError):
                await client.send(b"x")
            await trio.sleep(LINGER_QUIET / 2)
        assert trio.current_time() == pytest.approx(LINGER_TIMEOUT, abs=LINGER_QUIET)


# Drain


async def test_b031_drain_closes_idle_connections_at_once_and_lets_a_stream_end(autojump_clock: MockClock) -> None:
    async with serving() as app:
        idle = await start(app, get("/healthz"))
        await idle.response()
        busy = await start(app, post("/sleep", b"20"))
        app.server.drain()
        assert await idle.rest() == b""
        assert trio.current_time() == 0
        response = await busy.response()
        assert (response.status, response.header("connection")) == (200, "close")
        assert trio.current_time() == 20
        assert await busy.rest() == b""


async def test_a_drained_server_returns_when_the_last_connection_has_ended(autojump_clock: MockClock) -> None:
    async with serving() as app:
        busy = await start(app, post("/sleep", b"20"))
        app.server.drain()
        app.server.drain()
        await busy.response()
        await busy.stream.aclose()
        await app.server.ended.wait()
        assert trio.current_time() == 20
        assert app.server.num_connections == 0
        assert repr(app.server) == "<HttpServer api, draining, 0 connections>"
        with pytest.raises(trio.BrokenResourceError):
            app.connect()


async def test_b031_half_a_request_has_bounded_time_and_is_then_refused(autojump_clock: MockClock) -> None:
    async with serving() as app:
        completed = await start(app, b"GET /healthz HTTP/1.1\r\n")
        abandoned = await start(app, b"GET /healthz HTTP/1.1\r\n")
        body = await start(app, build("POST", "/echo", "Content-Length: 9"))
        app.server.drain()
        await completed.send(b"Host: x\r\n\r\n")
        for client in (completed, abandoned, body):
            response = await client.response()
            assert (response.status, response.header("connection")) == (503, "close")
            assert response.header("retry-after") == "1"
            assert b"shutting_down" in response.body
        assert trio.current_time() == pytest.approx(REFUSAL_TIMEOUT)
        assert app.requests == []


async def test_a_request_that_was_sent_ahead_is_refused_by_a_drain(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = await start(app, post("/sleep", b"5") + get("/healthz"))
        app.server.drain()
        assert (await client.response()).status == 200
        assert await client.rest() == b""


async def test_a_request_behind_a_stream_is_refused_with_503_by_a_drain(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = await start(app, post("/stream-forever") + get("/healthz"))
        await client.until(b"xxx\n\n\r\n")
        app.server.drain()
        app.server.cut()
        rest = await client.rest()
        assert rest.count(b"HTTP/1.1 ") == 0
        assert b'data: {"error":"shutting_down"}' in rest


async def test_b031_what_is_cut_ends_with_an_error_event_and_closes(autojump_clock: MockClock) -> None:
    async with serving() as app:
        stream = await start(app, post("/stream-forever"))
        waiting = await start(app, post("/forever"))
        app.server.drain()
        await trio.sleep(29.5)  # between two events: a write that is cut ends a stream without a word
        assert app.num_running() == 2
        app.server.cut()
        app.server.cut()
        response = await stream.response()
        assert response.body.endswith(b'data: {"error":"shutting_down"}\n\n')
        assert await stream.rest() == b""
        refused = await waiting.response()
        assert (refused.status, refused.header("connection")) == (503, "close")
        assert app.num_running() == 0
        await trio.sleep(1)
        assert app.server.num_connections == 0


async def test_a_handler_cannot_end_its_stream_once_it_is_cut(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = await start(app, post("/write-in-cleanup"))
        app.server.cut()
        assert (await client.response()).body == b'data: {"error":"shutting_down"}\n\n'


async def test_a_client_that_leaves_is_noticed_after_a_pause_in_reading(autojump_clock: MockClock) -> None:
    """Reading pauses behind a long burst; the pause ends when the answer to its last request begins."""
    limits = Limits(max_header_bytes=500, max_body_bytes=500)
    async with serving(limits) as app:
        client = await start(app, post("/nowhere", b"x" * 400) * 4 + post("/forever"))
        assert app.num_running() == 1
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.num_running() == 0
        assert app.server.num_connections == 0


async def test_a_client_that_does_not_read_cannot_hold_up_a_cut(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect(is_clogged=True)
        await client.send(post("/stream-forever"))
        await wait_all_tasks_blocked()
        app.server.cut()
        await trio.sleep(2 * REFUSAL_TIMEOUT)
        assert app.server.num_connections == 0
        assert app.num_running() == 0


async def test_cancelling_the_server_ends_everything_at_once(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = await start(app, post("/stream-forever"))
        await client.response_head()
    assert app.num_running() == 0
    assert app.server.num_connections == 0
    assert b"0\r\n\r\n" not in await client.rest()


# Too many connections


async def test_a_connection_too_many_is_told_so_and_closed(autojump_clock: MockClock) -> None:
    async with serving(Limits(max_connections=2)) as app:
        kept = [await start(app, post("/forever")) for _ in range(2)]
        extra = await start(app, get("/healthz", "X-Request-Id: mine"))
        response = await extra.response()
        assert (response.status, response.header("connection")) == (503, "close")
        assert response.header("retry-after") == "1"
        assert response.header("x-request-id") == "mine"
        assert b"no_capacity" in response.body
        assert await extra.rest() == b""
        assert app.num_running() == len(kept)


async def test_a_connection_too_many_that_says_nothing_does_not_stay(autojump_clock: MockClock) -> None:
    async with serving(Limits(max_connections=0)) as app:
        client = app.connect()
        assert (await client.response()).status == 503
        assert trio.current_time() == pytest.approx(REFUSAL_TIMEOUT)


async def test_a_flood_of_connections_is_closed_unheard(autojump_clock: MockClock) -> None:
    async with serving(Limits(max_connections=1)) as app:
        clients = [app.connect() for _ in range(200)]
        await wait_all_tasks_blocked()
        assert app.server.num_connections < 100
        assert await clients[-1].rest() == b""
        assert trio.current_time() == 0


class HastyStream(trio.abc.Stream):
    """A server's end whose client leaves with the last byte it wanted, and is seen to before the write returns."""

    def __init__(self, stream: trio.abc.Stream, client: trio.abc.Stream, last: bytes) -> None:
        self._stream = stream
        self._client = client
        self._last = last

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)
        if bytes(data).rstrip().endswith(self._last):
            with trio.CancelScope(shield=True):
                await self._client.aclose()
                await wait_all_tasks_blocked()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize(
    ("request_bytes", "last", "outcome"),
    [
        (post("/echo", b"whole"), b"whole", Outcome.COMPLETE),
        (post("/stream", b"3"), b"[DONE]", Outcome.COMPLETE),
        (post("/stream", b"3"), b"data: 2", Outcome.CLIENT_LEFT),
        (post("/refuse"), b"got 3", Outcome.COMPLETE),
        (post("/bug-late"), b"data: 1", Outcome.CLIENT_LEFT),
    ],
    ids=["whole", "stream", "half a stream", "refusal", "without our error"],
)
async def test_a_client_that_leaves_with_the_whole_answer_has_not_left_early(
    request_bytes: bytes, last: bytes, outcome: Outcome
) -> None:
    async with serving() as app:
        ours, theirs = trio.testing.memory_stream_pair()
        app.listener.take(HastyStream(ours, theirs, last))
        await theirs.send_all(request_bytes)
        await wait_all_tasks_blocked(0.01)  # later than the stream's own
        assert [record.outcome for record in app.records] == [outcome]
        assert app.server.num_connections == 0

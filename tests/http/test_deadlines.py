"""Every wait on a peer ends: slow senders, slow readers, idle connections."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import RawClient, build, get, post, serving
from tlserve.http.access import Outcome
from tlserve.http.limits import LINGER_QUIET, SEND_SIZE, Limits

LIMITS = Limits(header_timeout=10, body_timeout=30, idle_timeout=75, write_timeout=20)


async def drip(client: RawClient, data: bytes) -> None:
    """One byte a second, until the server has had enough."""
    for index in range(len(data)):
        try:
            await client.send(data[index : index + 1])
        except trio.BrokenResourceError:
            return
        await trio.sleep(1)


async def test_b096_half_a_head_is_a_408_at_the_deadline(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        client = app.connect()
        await client.send(b"GET / HTTP/1.1\r\n")
        response = await client.response()
        assert trio.current_time() == pytest.approx(10)
        assert (response.status, response.header("connection")) == (408, "close")
        assert response.body == b"request_timeout: the headers of a request must arrive within 10 s"
        assert await client.rest() == b""


@pytest.mark.parametrize("data", [get("/healthz", "A: " + "a" * 100), b"\r\n" * 100])
async def test_b096_a_byte_a_second_does_not_move_the_deadline_of_the_head(
    autojump_clock: MockClock, data: bytes
) -> None:
    async with serving(LIMITS) as app, trio.open_nursery() as nursery:
        client = app.connect()
        nursery.start_soon(drip, client, data)
        assert (await client.response()).status == 408
        assert trio.current_time() == pytest.approx(10)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
async def test_b096_a_byte_a_second_does_not_move_the_deadline_of_the_body(
    autojump_clock: MockClock, framing: str
) -> None:
    async with serving(LIMITS) as app, trio.open_nursery() as nursery:
        client = app.connect()
        await client.send(build("POST", "/echo", framing))
        began = trio.current_time()
        nursery.start_soon(drip, client, b"50\r\n" + b"a" * 80)
        response = await client.response()
        assert (response.status, response.header("connection")) == (408, "close")
        assert trio.current_time() - began == pytest.approx(30)
        nursery.cancel_scope.cancel()


async def test_b096_five_hundred_slow_clients_do_not_keep_a_good_one_waiting(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        slow = [app.connect() for _ in range(500)]
        for client in slow:
            await client.send(b"GET /")
        good = app.connect()
        await good.send(get("/healthz"))
        assert (await good.response()).status == 200
        assert trio.current_time() == 0
        await trio.sleep(LIMITS.header_timeout + 1 + LINGER_QUIET)
        assert app.server.num_connections == 1


async def test_a_connection_that_sends_nothing_is_closed_without_a_word(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        client = app.connect()
        assert await client.rest() == b""
        assert trio.current_time() == pytest.approx(10)
        assert app.records == []


async def test_an_idle_connection_is_closed_without_a_word(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        client = app.connect()
        await client.send(get("/healthz"))
        await client.response()
        assert await client.rest() == b""
        assert trio.current_time() == pytest.approx(75)
        assert len(app.records) == 1


async def test_b032_the_idle_deadline_never_ends_a_pipelined_request(autojump_clock: MockClock) -> None:
    async with serving(Limits(idle_timeout=1)) as app:
        client = app.connect()
        await client.send(post("/sleep", b"0.5") + post("/sleep", b"3"))
        assert (await client.response()).body == b"0.5"
        assert (await client.response()).body == b"3"


async def test_no_deadline_ends_a_handler_that_takes_long(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        client = app.connect()
        await client.send(post("/sleep", b"1000"))
        assert (await client.response()).body == b"1000"


async def test_a_client_that_stops_reading_ends_its_stream(autojump_clock: MockClock) -> None:
    async with serving(LIMITS) as app:
        client = app.connect(is_clogged=True)
        await client.send(post("/stream-forever"))
        await client.response_head()
        await wait_all_tasks_blocked()
        assert app.num_running() == 1
        await trio.sleep(LIMITS.write_timeout + 1)
        assert app.num_running() == 0
        assert app.server.num_connections == 0
        assert [record.outcome for record in app.records] == [Outcome.WRITE_TIMEOUT]


async def test_a_client_that_reads_slowly_but_steadily_gets_all_of_a_long_answer(autojump_clock: MockClock) -> None:
    async with serving(Limits(write_timeout=20, max_body_bytes=4 * SEND_SIZE)) as app:
        client = app.connect(is_clogged=True)
        await client.send(post("/echo", b"x" * (3 * SEND_SIZE)))
        while not app.records:
            client.received += await client.stream.receive_some(SEND_SIZE // 8)
            await trio.sleep(2)
        assert trio.current_time() > 40
        assert app.records[0].outcome is Outcome.COMPLETE
        assert len((await client.response()).body) == 3 * SEND_SIZE

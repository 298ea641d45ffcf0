"""Requests and answers on one connection: framing of both, order, reuse, errors."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.http.client import HOST, build, chunked, get, post, serving
from tlserve.http.access import Outcome
from tlserve.http.connection import State
from tlserve.http.limits import CHUNKS_PER_TURN, Limits

CHUNKED = "Transfer-Encoding: chunked"


async def test_an_answer_has_a_length_a_date_and_a_request_id(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(get("/healthz"))
        response = await client.response()
        assert (response.version, response.status, response.body) == ("HTTP/1.1", 200, b'{"status":"ok"}')
        assert response.header("content-length") == "15"
        assert (response.header("date") or "").endswith(" GMT")
        assert (response.header("x-request-id") or "").startswith("req-")
        assert response.header("connection") is None


async def test_a_connection_is_kept_for_the_next_request(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        for number in range(3):
            await client.send(post("/echo", b"%d" % number))
            assert (await client.response()).body == b"%d" % number
        assert app.server.num_connections == 1


async def test_a_request_reaches_the_handler_as_it_was_sent(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post("/echo?a=%20b", b"\x00\xff", "X-Two: a", "X-Two: \xe9", "X-Request-Id: mine"))
        await client.response()
        (request,) = app.requests
        assert (request.method, request.path, request.query, request.body) == ("POST", "/echo", "a=%20b", b"\x00\xff")
        assert [value for name, value in request.headers if name == "x-two"] == ["a", "é"]
        assert request.header("x-two") == "a"
        assert request.header("x-none") is None
        assert request.request_id == "mine"


async def test_an_absolute_target_is_served_whatever_the_host_header_says(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(get("http://other:80/v1/models/a%2Fb?q"))
        assert (await client.response()).body == b"a/b"


async def test_every_answer_carries_the_id_of_its_request(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        for path, status in [("/echo", 200), ("/refuse", 400), ("/nowhere", 404), ("/healthz", 405), ("/bug", 500)]:
            await client.send(post(path, b"", f"X-Request-Id: id-{status}"))
            response = await client.response()
            assert (response.status, response.header("x-request-id")) == (status, f"id-{status}")


async def test_b095_an_id_that_is_not_well_formed_is_replaced(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(get("/healthz", "X-Request-Id: a\tb") + get("/healthz", "X-Request-Id: a", "X-Request-Id: b"))
        ids = [(await client.response()).header("x-request-id") for _ in range(2)]
        assert len(set(ids)) == 2
        assert all((name or "").startswith("req-") for name in ids)


async def test_a_chunked_body_is_read_to_its_end(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        parts = [b"ab", b"c" * 10_000] + [b"d" * 200] * (2 * CHUNKS_PER_TURN)
        await client.send(build("POST", "/echo", CHUNKED) + chunked(*parts) + get("/healthz"))
        assert (await client.response()).body == b"".join(parts)
        assert (await client.response()).status == 200


async def test_a_stream_is_chunked_and_leaves_the_connection_usable(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post("/stream", b"3"))
        response = await client.response()
        assert response.header("transfer-encoding") == "chunked"
        assert response.header("content-type") == "text/event-stream; charset=utf-8"
        assert response.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
        await client.send(get("/healthz"))
        assert (await client.response()).status == 200


async def test_b035_a_client_of_http_1_0_gets_the_same_bytes_unchunked_and_then_the_end(
    autojump_clock: MockClock,
) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(b"POST /stream HTTP/1.0\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\n3")
        response = await client.response()
        assert response.header("transfer-encoding") is None
        assert response.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"


async def test_http_1_0_needs_no_host(autojump_clock: MockClock) -> None:
    async with serving() as app:
        assert b"200 OK" in await app.exchange(b"GET /healthz HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize("path", ["/healthz", "/v1/models/a"])
async def test_b036_head_gets_the_headers_of_get_and_no_body(autojump_clock: MockClock, path: str) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(build("HEAD", path) + get(path))
        head = await client.response(to_head=True)
        whole = await client.response()
        assert head.status == whole.status == 200
        assert head.header("content-length") == whole.header("content-length") == str(len(whole.body))


async def test_head_of_an_error_has_no_body_either(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(build("HEAD", "/nowhere") + build("HEAD", "/echo") + get("/healthz"))
        assert (await client.response(to_head=True)).status == 404
        assert (await client.response(to_head=True)).header("allow") == "POST"
        assert (await client.response()).status == 200


async def test_options_for_the_server_says_which_methods_there_are(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(build("OPTIONS", "*"))
        response = await client.response()
        assert (response.status, response.header("allow")) == (204, "GET, HEAD, POST")
        assert response.header("content-length") is None


async def test_an_upgrade_is_declined_by_answering(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        for _ in range(2):
            await client.send(
                get("/healthz", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x")
            )
            assert (await client.response()).status == 200


async def test_connect_is_refused(autojump_clock: MockClock) -> None:
    async with serving() as app:
        assert (await app.exchange(b"CONNECT a:443 HTTP/1.1\r\n" + HOST + b"\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("version", "status"),
    [("HTTP/1.2", 200), ("HTTP/2.0", 505), ("HTTP/0.9", 505), ("http/1.1", 400), ("HTTP/1.10", 400)],
)
async def test_a_version_of_http_is_served_or_refused_by_its_major_number(
    autojump_clock: MockClock, version: str, status: int
) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(b"GET /healthz %b\r\n" % version.encode() + HOST + b"\r\n")
        assert (await client.response()).status == status


# Pipelining and the end of a connection


async def test_b112_ten_requests_in_one_write_are_answered_in_order(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(b"".join(post("/echo", b"%d" % number) + get("/healthz") for number in range(5)))
        for number in range(5):
            assert (await client.response()).body == b"%d" % number
            assert (await client.response()).body == b'{"status":"ok"}'


async def test_b112_half_a_request_behind_a_whole_one_is_completed_later(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        second = post("/echo", b"second")
        await client.send(post("/stream", b"3") + second[:20])
        assert (await client.response()).status == 200
        await trio.sleep(1)
        await client.send(second[20:])
        assert (await client.response()).body == b"second"


async def test_b112_nothing_is_answered_after_a_request_that_closes(autojump_clock: MockClock) -> None:
    async with serving() as app:
        answer = await app.exchange(get("/healthz", "Connection: close") + get("/healthz"))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"Connection: close" in answer
        assert len(app.records) == 1


async def test_a_whole_request_may_be_sent_ahead_while_an_answer_is_under_way(autojump_clock: MockClock) -> None:
    limits = Limits(max_body_bytes=200_000)
    async with serving(limits) as app:
        client = app.connect()
        await client.send(post("/sleep", b"5"))
        await client.send(post("/echo", b"x" * limits.max_body_bytes))
        assert (await client.response()).body == b"5"
        assert len((await client.response()).body) == limits.max_body_bytes


async def test_a_client_that_sends_more_than_that_ahead_is_let_go(autojump_clock: MockClock) -> None:
    limits = Limits(max_body_bytes=100_000)
    async with serving(limits) as app:
        client = app.connect()
        await client.send(post("/forever"))
        await wait_all_tasks_blocked()
        assert app.num_running() == 1
        await client.send(b"x" * (limits.max_ahead_bytes + 1))
        assert await client.rest() == b""
        assert app.num_running() == 0


# Expect: 100-continue


async def test_b037_a_client_that_asks_is_told_to_continue(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(build("POST", "/echo", "Expect: 100-continue", "Content-Length: 4"))
        assert (await client.response()).status == 100
        await client.send(b"body")
        assert (await client.response()).body == b"body"


@pytest.mark.parametrize(
    ("path", "length", "status"), [("/echo", 10**9, 413), ("/nowhere", 4, 404), ("/healthz", 4, 405)]
)
async def test_b037_a_refusal_comes_without_100_and_closes(
    autojump_clock: MockClock, path: str, length: int, status: int
) -> None:
    async with serving() as app:
        answer = await app.exchange(build("POST", path, "Expect: 100-continue", f"Content-Length: {length}"))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close" in answer
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_b037_a_client_that_closes_instead_of_sending_the_body_is_no_fault(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(build("POST", "/echo", "Expect: 100-continue", "Content-Length: 4"))
        await client.response()
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert app.server.num_connections == 0
        assert caplog.records == []


async def test_http_1_0_does_not_know_100(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx")
        assert (await client.response()).status == 200


async def test_a_refused_body_is_read_past_so_that_the_connection_stays_usable(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post("/nowhere", b"x" * 10_000) + get("/healthz"))
        assert (await client.response()).status == 404
        assert (await client.response()).status == 200


# Sizes


async def test_b021_a_body_above_the_limit_is_refused_before_it_is_sent(autojump_clock: MockClock) -> None:
    limits = Limits(max_body_bytes=1000)
    async with serving(limits) as app:
        client = app.connect()
        await client.send(build("POST", "/echo", "Content-Length: 1001"))
        response = await client.response()
        assert (response.status, response.header("connection")) == (413, "close")
        assert await client.rest() == b""


async def test_b021_a_chunked_body_is_refused_where_it_passes_the_limit(autojump_clock: MockClock) -> None:
    async with serving(Limits(max_body_bytes=1000)) as app:
        client = app.connect()
        await client.send(build("POST", "/echo", CHUNKED) + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n")
        response = await client.response()
        assert (response.status, response.header("connection")) == (413, "close")


async def test_headers_above_the_limit_are_refused(autojump_clock: MockClock) -> None:
    limits = Limits(max_header_bytes=1000)
    async with serving(limits) as app:
        client = app.connect()
        await client.send(get("/healthz", "A: " + "a" * 1000))
        response = await client.response()
        assert (response.status, response.header("connection")) == (431, "close")


# What goes wrong in a handler


async def test_an_error_of_the_request_leaves_the_connection_usable(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post("/refuse") + get("/healthz"))
        response = await client.response()
        assert (response.status, response.header("connection")) == (400, None)
        assert response.body == b"invalid_request_error: temperature must be between 0 and 2, got 3"
        assert (await client.response()).status == 200


@pytest.mark.parametrize("path", ["/bug", "/silent", "/bug-beside-refusal"])
async def test_a_bug_is_a_500_that_tells_nothing_and_a_traceback_in_the_log(
    autojump_clock: MockClock, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post(path, b"", "X-Request-Id: abc"))
        response = await client.response()
        assert (response.status, response.header("connection")) == (500, "close")
        assert b"secret" not in response.body
        assert b"abc" in response.body
        (record,) = caplog.records
        assert "abc" in record.getMessage()
        assert record.exc_info is not None
        assert await client.rest() == b""
        other = app.connect()
        await other.send(get("/healthz"))
        assert (await other.response()).status == 200


@pytest.mark.parametrize(
    ("path", "code"), [("/refuse-late", b"invalid_request_error"), ("/bug-late", b"internal_error")]
)
async def test_b072_a_stream_that_breaks_ends_with_one_error_event_and_a_correct_body(
    autojump_clock: MockClock, path: str, code: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(post(path))
        response = await client.response()
        assert response.status == 200
        assert response.body.endswith(b'data: {"error":"%b"}\n\n' % code)
        assert b"[DONE]" not in response.body
        assert [record.outcome for record in app.records] == [Outcome.FAILED]
        assert len(caplog.get_records("call")) == (path == "/bug-late")


async def test_a_broken_stream_closes_the_connection(autojump_clock: MockClock) -> None:
    async with serving() as app:
        answer = await app.exchange(post("/refuse-late") + get("/healthz"))
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_messages_of_h11_are_passed_on_without_the_bytes_they_quote(autojump_clock: MockClock) -> None:
    async with serving() as app:
        answer = await app.exchange(b"GET / HTTP/1.1\r\nHost: x\r\nBad Name: secret\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"secret" not in answer
        assert b"illegal header line" in answer


# The record of a request


async def test_a_record_tells_route_status_and_outcome(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await client.send(get("/v1/models/a%0ab", "X-Request-Id: mine"))
        await client.response()
        (record,) = app.records
        assert (record.server, record.request_id, record.method) == ("api", "mine", "GET")
        assert (record.route, record.status, record.outcome) == ("/v1/models/{id:path}", 200, Outcome.COMPLETE)
        assert record.notes == {}


async def test_a_record_has_the_time_from_the_first_byte_to_the_last(autojump_clock: MockClock) -> None:
    async with serving() as app:
        client = app.connect()
        await trio.sleep(5)
        data = post("/sleep", b"3")
        await client.send(data[:10])
        await trio.sleep(2)
        await client.send(data[10:])
        await client.response()
        assert app.records[0].duration == 5


async def test_a_request_that_is_not_understood_has_a_record_too(autojump_clock: MockClock) -> None:
    async with serving() as app:
        await app.exchange(b"\x00")
        (record,) = app.records
        assert (record.method, record.route, record.status) == ("", "", 400)


def test_a_connection_says_what_it_is_doing() -> None:
    assert [state.value for state in State] == ["new", "idle", "reading", "answering", "closing"]

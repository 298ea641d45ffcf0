"""The client side of HTTP: addresses, replies in pieces, reuse, and servers that break off."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from tlserve.http.client import LATEST, ClientConnection, ConnectionFailed, Origin, connect
from tlserve.http.limits import RECEIVE_SIZE

ORIGIN = Origin.parse("http://test/v1/")
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a", Origin("a", 80, False, "")),
        ("http://a:8000/v1/", Origin("a", 8000, False, "/v1")),
        ("https://a.b/x/v1", Origin("a.b", 443, True, "/x/v1")),
        ("http://[::1]:8000/v1", Origin("::1", 8000, False, "/v1")),
        ("http://my_host.a-b./@me/v1", Origin("my_host.a-b.", 80, False, "/@me/v1")),
    ],
)
def test_a_url_says_where_and_below_which_path(url: str, expected: Origin) -> None:
    assert Origin.parse(url) == expected


ODD = [
    "http://a/v 1",
    "http://a/v1\r\nX: y",
    "http://a/v1\n",
    "http://a/\xe9",
    "http://\xe9.example/v1",
    "http://a..b/v1",
    f"http://{'a' * 64}/v1",
    f"http://{'a.' * 127}a/v1",
    "http://a b/v1",
    "http://a%00/v1",
    "http://[::1/v1",
    "http://[x]/v1",
    "http://a:0/v1",
    "http://a:65536/v1",
    "http://user:secret@a/v1",
    "http://a/v1?key=1",
    "http://a/v1#x",
]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http:///v1", "http://a:x", *ODD])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        Origin.parse(url)


def test_an_ipv6_host_is_bracketed_in_the_host_header() -> None:
    assert Origin.parse("http://[::1]:8000").authority == "[::1]:8000"


Server = Callable[[trio.abc.Stream], Awaitable[None]]


async def ask(server: Server) -> tuple[ClientConnection, int, bytes]:
    """One request to a server that is one function, which runs when the request has been sent."""
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, ORIGIN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server, theirs)
        status = await connection.request("GET", "/models")
        return connection, status, await connection.read_all()


def answering(*pieces: bytes, then_close: bool = False) -> Server:
    async def server(stream: trio.abc.Stream) -> None:
        request = await stream.receive_some(10_000)
        assert bytes(request).startswith(b"GET /v1/models HTTP/1.1\r\nHost: test:80\r\n")
        for piece in pieces:
            await stream.send_all(piece)
            await trio.testing.wait_all_tasks_blocked()
        if then_close:
            await stream.aclose()

    return server


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 5\r\n\r\nhello"],
        [OK + b"Content-Length: 5\r\n\r\n", b"he", b"llo"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello"],
    ],
)
async def test_a_reply_is_read_to_its_end_and_the_connection_can_be_used_again(pieces: list[bytes]) -> None:
    connection, status, body = await ask(answering(*pieces))
    assert (status, body) == (200, b"hello")
    assert connection.is_reusable


async def test_the_headers_of_a_reply_are_there_with_names_in_lower_case() -> None:
    connection, _, _ = await ask(answering(OK + b"X-Request-Id: a\r\nAllow: \xe9\r\nContent-Length: 0\r\n\r\n"))
    assert connection.headers == (("x-request-id", "a"), ("allow", "\xe9"), ("content-length", "0"))


async def test_a_reply_that_ends_with_the_connection_is_whole_but_the_last() -> None:
    connection, _, body = await ask(answering(OK + b"\r\nhello", then_close=True))
    assert body == b"hello"
    assert not connection.is_reusable


async def test_a_server_that_closes_after_the_reply_is_not_asked_again() -> None:
    connection, _, _ = await ask(answering(OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n"))
    assert not connection.is_reusable


async def test_a_piece_is_given_as_soon_as_it_has_come() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, ORIGIN)
    await theirs.send_all(OK + b"Content-Length: 4\r\n\r\nab")
    await connection.request("GET", "/models")
    assert await connection.read() == b"ab"
    await theirs.send_all(b"cd")
    assert [await connection.read(), await connection.read()] == [b"cd", b""]


TICK = LATEST / 8


async def read_late(*pieces: bytes, then_close: bool = False) -> tuple[bool, list[list[tuple[float, bytes]]]]:
    """What ``read_late`` gives, one call after the other, of pieces that come a tick apart, and reusability.

    Of what is not over a tick after the last piece came nothing can be used again.
    """
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, ORIGIN)
    found = []

    async def serve() -> None:
        for piece in pieces:
            await theirs.send_all(piece)
            await trio.sleep(TICK)
        if then_close:
            await theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        start = trio.current_time()
        await connection.request("GET", "/models")
        while arrivals := await connection.read_late():
            found.append([(round((time - start) / TICK, 1), piece) for time, piece in arrivals])
        is_in_time = trio.current_time() - start <= len(pieces) * TICK
    return connection.is_reusable and is_in_time, found


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


async def test_late_reading_looks_into_chunks_once_the_body_may_have_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    is_reusable, found = await read_late(CHUNKED, b"2\r\nhe\r\n", b"3\r\nl", b"lo\r\n0\r\n", b"\r\n")
    assert is_reusable
    assert found == [[(1, b"he"), (2, b"l"), (3, b"lo")]]


async def test_late_reading_gives_what_came_with_the_head_and_reads_on(autojump_clock: trio.testing.MockClock) -> None:
    is_reusable, found = await read_late(CHUNKED + b"2\r\nhe\r\n", b"3\r\nllo\r\n0\r\nDigest: x\r\n\r\n")
    assert is_reusable
    assert found == [[(0, b"he")], [(1, b"llo")]]


async def test_late_reading_looks_at_once_where_a_body_is_not_chunked(autojump_clock: trio.testing.MockClock) -> None:
    is_reusable, found = await read_late(OK + b"Content-Length: 5\r\n\r\n", b"he", b"llo")
    assert is_reusable
    assert found == [[(1, b"he")], [(2, b"llo")]]


async def test_late_reading_does_not_keep_a_long_body(autojump_clock: trio.testing.MockClock) -> None:
    chunk = b"%x\r\n%s\r\n" % (RECEIVE_SIZE - 100, b"a" * (RECEIVE_SIZE - 100))
    _, found = await read_late(CHUNKED, chunk, chunk, chunk, b"0\r\n\r\n")
    assert [[len(piece) for _, piece in arrivals] for arrivals in found] == [
        [RECEIVE_SIZE - 100] * 2,
        [RECEIVE_SIZE - 100],
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        (CHUNKED + b"2\r\nhe\r\n0\r\n", b"\r\n"),
        (CHUNKED + b"2\r\nhe\r\n0\r\n\r", b"\n"),
        (CHUNKED, b"2\r\nhe\r\n0\r\n", b"\r\n"),
        (CHUNKED, b"%x\r\n%s\r\n0\r\n" % (RECEIVE_SIZE, b"a" * RECEIVE_SIZE), b"\r\n"),
    ],
)
async def test_late_reading_sees_an_end_wherever_it_is_cut(
    pieces: tuple[bytes, ...], autojump_clock: trio.testing.MockClock
) -> None:
    is_reusable, _ = await read_late(*pieces)
    assert is_reusable


@pytest.mark.parametrize("end", [b"0\r\n\n", b""])
async def test_late_reading_looks_after_a_second_in_any_case(
    end: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """A body may end in line feeds alone, and a server may say something and fall silent."""
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, ORIGIN)
    await theirs.send_all(CHUNKED)
    await connection.request("GET", "/models")
    await theirs.send_all(b"2\r\nhe\r\n" + end)
    assert await connection.read_late() == [(trio.current_time() - LATEST, b"he")]


async def test_late_reading_gives_what_came_before_a_break(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    connection = ClientConnection(ours, ORIGIN)
    await theirs.send_all(CHUNKED)
    await connection.request("GET", "/models")
    await theirs.send_all(b"2\r\nhe\r\n")
    await theirs.aclose()
    assert [piece for _, piece in await connection.read_late()] == [b"he"]
    for _ in range(2):
        with pytest.raises(ConnectionFailed, match="the server broke off the answer"):
            await connection.read_late()


async def test_late_reading_says_that_an_answer_was_broken_off(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(ExceptionGroup) as group:
        await read_late(CHUNKED, b"2\r\nhe\r\n", then_close=True)
    assert group.group_contains(ConnectionFailed, match="the server broke off the answer")


@pytest.mark.parametrize(
    "server",
    [
        answering(b"SSH-2.0\r\n\r\n"),
        answering(then_close=True),
        answering(OK + b"Content-Length: 5\r\n\r\nhe", then_close=True),
    ],
)
async def test_a_server_that_breaks_off_or_speaks_something_else_is_an_error(server: Server) -> None:
    with pytest.raises(ExceptionGroup) as group:
        await ask(server)
    assert group.group_contains(ConnectionFailed)


async def test_an_answer_that_is_broken_off_is_said_to_be_so() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConnectionFailed, match="^the server broke off the answer$")):
        await ask(answering(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhe", then_close=True))


async def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with pytest.raises(ConnectionFailed, match=r"^cannot connect to 127\.0\.0\.1:1: Connection refused$"):
        await connect(Origin.parse("http://127.0.0.1:1"))

"""Invariant: any bytes, split anywhere, get well-formed answers in order, none of them a 500, and then an end.

Whatever is found wrong with a request ends the connection: after an answer that says so, none follows.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.http.client import HOST, RawResponse, build, chunked, get, post, serving
from tests.profiles import examples
from tlserve.http.limits import Limits

GOOD = [
    get("/healthz"),
    get("/v1/models/a%2Fb"),
    post("/echo", b"body"),
    post("/stream", b"3"),
    post("/nowhere", b"body"),
    build("POST", "/echo", "Transfer-Encoding: chunked") + chunked(b"ab", b"c"),
    b"POST /echo HTTP/1.0\r\nContent-Length: 1\r\n\r\nx",
]
FRAGMENTS = [
    *[
        b"GET ",
        b"POST /echo ",
        b"HTTP/1.1\r\n",
        b"HTTP/1.0",
        b"\r\n",
        b"\r",
        b"\n",
        b" ",
        b":",
        b"0",
        b"5",
        b"\x00",
        b"\xff",
    ],
    *[HOST, b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Upgrade: x\r\n"],
    *[b"Expect: 100-continue\r\n", b"a" * 300, b"5\r\nabcde\r\n", b"0\r\n\r\n"],
]
STREAMS = {
    "three good ones": GOOD[0] + GOOD[3] + GOOD[2],
    "chunks with extensions and a trailer": build("POST", "/echo", "Transfer-Encoding: chunked")
    + b"3;a=b\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\nX: y\r\n\r\n"
    + GOOD[0],
    "two lengths behind a good one": GOOD[0] + build("POST", "/echo", "Content-Length: 1", "Content-Length: 2") + b"ab",
    "a bad chunk": build("POST", "/echo", "Transfer-Encoding: chunked") + b"2\r\nab\r\n-1\r\nx\r\n0\r\n\r\n" + GOOD[0],
    "a head past its limit": GOOD[0] + build("GET", "/healthz", "X: " + "a" * 400),
    "a body past its limit": post("/echo", b"a" * 201) + GOOD[0],
    "HTTP/1.0 and more": GOOD[6] + GOOD[0],
}
LIMITS = Limits(max_header_bytes=400, max_body_bytes=200)


def comparable(responses: list[RawResponse]) -> list[RawResponse]:
    """Without the ids and the date of each."""
    return [
        replace(response, headers=tuple(item for item in response.headers if item[0] not in ("x-request-id", "date")))
        for response in responses
    ]


@pytest.mark.parametrize("data", STREAMS.values(), ids=STREAMS)
def test_a_stream_cut_at_any_place_gets_the_answers_of_the_whole(data: bytes) -> None:
    """Each place alone, of which the quick profile takes some, and all of them at once."""
    num_places = min(examples(25), len(data) - 1)
    places = [1 + number * (len(data) - 1) // num_places for number in range(num_places)]
    ways = [[data], [data[i : i + 1] for i in range(len(data))], *([data[:place], data[place:]] for place in places)]
    found = [comparable(trio.run(answers, parts, clock=MockClock(autojump_threshold=0))) for parts in ways]
    assert found[0]
    assert found == found[:1] * len(found)


async def answers(parts: list[bytes]) -> list[RawResponse]:
    async with serving(LIMITS) as app:
        client = app.connect()
        for part in parts:
            with contextlib.suppress(trio.BrokenResourceError):
                await client.send(part)
            await trio.sleep(0.01)
        found = []
        with contextlib.suppress(EOFError), trio.fail_after(1000):
            while True:
                found.append(await client.response())
        assert not client.received
        assert app.num_running() == 0
        await trio.sleep(10)
        assert app.server.num_connections == 0
        return found


@settings(max_examples=examples(150))
@given(
    st.lists(st.sampled_from(GOOD) | st.sampled_from(FRAGMENTS), max_size=10), st.lists(st.integers(1, 60), max_size=8)
)
def test_any_bytes_get_well_formed_answers_and_then_an_end(pieces: list[bytes], sizes: list[int]) -> None:
    data = b"".join(pieces)
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    found = trio.run(answers, [*parts, data], clock=MockClock(autojump_threshold=0))
    assert all(response.status < 500 for response in found)
    closing = [response for response in found if response.header("connection") == "close"]
    assert closing in ([], found[-1:])


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(GOOD[:6]), min_size=1, max_size=4), st.data())
def test_a_flaw_in_one_request_leaves_the_answers_before_it_alone(requests: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(requests)
    place = data.draw(st.integers(0, len(whole) - 1))
    flawed = whole[:place] + data.draw(st.binary(min_size=1, max_size=3)) + whole[place:]
    clock = MockClock(autojump_threshold=0)
    statuses = [response.status for response in trio.run(answers, [flawed], clock=clock)]
    untouched = next(index for index in range(len(requests)) if place < len(b"".join(requests[: index + 1])))
    expected = [404 if b"/nowhere" in request else 200 for request in requests]
    assert statuses[:untouched] == expected[:untouched]

"""Byte streams made to confuse: one error, then the end, and nothing behind it is answered."""

from __future__ import annotations

import time

import pytest
import trio
from trio.testing import MockClock

from tests.http.client import HOST, build, chunked, get, post, serving
from tlserve.http.limits import Limits

CHUNKED = "Transfer-Encoding: chunked"
SMUGGLED = get("/healthz")

BAD_REQUESTS = {
    "b039 length +5": build("POST", "/echo", "Content-Length: +5") + b"abcde",
    "b039 length 5_0": build("POST", "/echo", "Content-Length: 5_0") + b"a" * 50,
    "b039 length -1": build("POST", "/echo", "Content-Length: -1"),
    "b039 length empty": build("POST", "/echo", "Content-Length: "),
    "b039 length 5 5": build("POST", "/echo", "Content-Length:  5 5") + b"abcde",
    "b039 length 0x5": build("POST", "/echo", "Content-Length: 0x5") + b"abcde",
    "b039 length of 2000 digits": build("POST", "/echo", "Content-Length: " + "1" * 2_000),
    "b039 length 10^30": build("POST", "/echo", "Content-Length: 1" + "0" * 30),
    "b039 chunk +5": build("POST", "/echo", CHUNKED) + b"+5\r\nabcde\r\n0\r\n\r\n",
    "b039 chunk 0x5": build("POST", "/echo", CHUNKED) + b"0x5\r\nabcde\r\n0\r\n\r\n",
    "b039 chunk 5_0": build("POST", "/echo", CHUNKED) + b"5_0\r\n" + b"a" * 80 + b"\r\n0\r\n\r\n",
    "b039 chunk ffffffffffffffffff": build("POST", "/echo", CHUNKED) + b"ffffffffffffffffff\r\nabc",
    "b040 length and chunked": build("POST", "/echo", "Content-Length: 0", CHUNKED) + chunked(b"a"),
    "b040 chunked and length": build("POST", "/echo", CHUNKED, "Content-Length: 6") + chunked(b"a"),
    "b040 lengths 5 and 6": build("POST", "/echo", "Content-Length: 5", "Content-Length: 6") + b"abcdef",
    "b040 lengths 5 and 5": build("POST", "/echo", "Content-Length: 5", "Content-Length: 5") + b"abcde",
    "b040 length 5, 6": build("POST", "/echo", "Content-Length: 5, 6") + b"abcdef",
    "b040 chunked, identity": build("POST", "/echo", CHUNKED + ", identity") + chunked(b"a"),
    "b040 xchunked": build("POST", "/echo", "Transfer-Encoding: xchunked") + chunked(b"a"),
    "b040 chunked twice": build("POST", "/echo", CHUNKED, CHUNKED) + chunked(b"a"),
    "b040 chunked in HTTP/1.0": b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"a"),
    "b040 folded header": b"POST /echo HTTP/1.1\r\n" + HOST + b"A: b\r\n Content-Length: 5\r\n\r\nabcde",
    "b040 folded coding": b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + chunked(b"a"),
    "b040 space before colon": build("POST", "/echo", "Content-Length : 5") + b"abcde",
    "b040 space before the first header": b"GET /healthz HTTP/1.1\r\n " + HOST + b"\r\n",
    "bare CR in a value": build("GET", "/healthz", "A: b\rContent-Length: 5"),
    "bare CR as line end": b"GET /healthz HTTP/1.1\r" + HOST + b"\r\n",
    "bare LF as line end": b"GET /healthz HTTP/1.1\n" + HOST + b"\r\n",
    "bare LF in a chunk": build("POST", "/echo", CHUNKED) + b"1\na\r\n0\r\n\r\n",
    "bare CR in a chunk extension": build("POST", "/echo", CHUNKED) + b"1;\ra\r\na\r\n0\r\n\r\n",
    "chunk longer than its size": build("POST", "/echo", CHUNKED) + b"1\r\nabc\r\n0\r\n\r\n",
    "NUL in a value": build("GET", "/healthz", "A: \x00"),
    "vertical tab after many spaces": build("GET", "/healthz", "A:" + " " * 2_000 + "\x0b"),
    "control character in a name": build("GET", "/healthz", "A\x01: b"),
    "no name": build("GET", "/healthz", ": b"),
    "no colon": build("GET", "/healthz", "Transfer-Encoding"),
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "host with a path": b"GET /healthz HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "host with a user": b"GET /healthz HTTP/1.1\r\nHost: a@b\r\n\r\n",
    "no version": b"GET /healthz\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /health z HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces": b"GET  /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw bytes in the target": b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n",
    "fragment in the target": get("/healthz#a"),
    "broken escape": get("/v1/models/%zz"),
    "method with a colon": b"GE:T /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("data", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
async def test_a_malformed_request_is_400_and_nothing_behind_it_is_answered(
    autojump_clock: MockClock, data: bytes, is_split: bool
) -> None:
    async with serving() as app, trio.open_nursery() as nursery:
        client = app.connect()

        async def send() -> None:
            step = 1 if is_split else len(data + SMUGGLED)
            for start in range(0, len(data + SMUGGLED), step):
                try:
                    await client.send((data + SMUGGLED)[start : start + step])
                except trio.BrokenResourceError:
                    return

        began = time.process_time()
        nursery.start_soon(send)
        response = await client.response()
        assert (response.status, response.header("connection")) == (400, "close")
        assert (response.header("x-request-id") or "").startswith("req-")
        assert await client.rest() == b""
        assert app.requests == []
        if not is_split:
            assert time.process_time() - began < 0.1


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
async def test_good_requests_are_the_same_however_they_are_split(autojump_clock: MockClock, size: int) -> None:
    data = (
        b"\r\n"
        + post("/echo", b"one")
        + build("POST", "/echo", CHUNKED)
        + chunked(b"t", b"wo")
        + build("HEAD", "/healthz")
        + post("/stream", b"3")
        + get("/healthz", "Connection: close")
    )
    async with serving() as app:
        client = app.connect()
        for start in range(0, len(data), size):
            await client.send(data[start : start + size])
        assert (await client.response()).body == b"one"
        assert (await client.response()).body == b"two"
        assert (await client.response(to_head=True)).status == 200
        assert b"data: 3\n\n" in (await client.response()).body
        assert (await client.response()).status == 200
        assert await client.rest() == b""


@pytest.mark.parametrize("size", [1, 100, 10_000])
async def test_the_limit_of_headers_does_not_depend_on_the_split(autojump_clock: MockClock, size: int) -> None:
    limits = Limits(max_header_bytes=1000)
    fits = get("/healthz", "A: " + "a" * (1000 - len(get("/healthz", "A: "))))
    assert len(fits) == 1000
    for data, status in [(fits, 200), (fits.replace(b"A: ", b"AA: "), 431)]:
        async with serving(limits) as app:
            client = app.connect()
            for start in range(0, len(data), size):
                await client.send(data[start : start + size])
            assert (await client.response()).status == status

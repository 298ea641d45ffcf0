"""Invariant: where a request ends, and whether it is refused, never depends on how its bytes were split over reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.http.client import HOST, build, chunked
from tlserve.errors import ApiError, HeadersTooLarge, InvalidRequest, PayloadTooLarge
from tlserve.http.framing import Framing, body_length
from tlserve.http.limits import CHUNKS_FREE, MAX_CHUNK_LINE, MAX_HEADERS

HEAD_LIMIT, BODY_LIMIT = 256, 4096
SPLITS = ["whole", "byte by byte", "with a tail"]
TAIL = b"GET /smuggled HTTP/1.1\r\n\r\n"


def arrivals(data: bytes, split: str) -> Iterator[bytes]:
    if split == "byte by byte":
        for index in range(len(data)):
            yield data[index : index + 1]
    else:
        yield data + (TAIL if split == "with a tail" else b"")


def cut_head(data: bytes, split: str, *, limit: int = HEAD_LIMIT) -> tuple[bytes | None, bytes]:
    """The head that is cut as ``data`` arrives, and what is left behind it."""
    framing = Framing(max_head_bytes=limit, max_body_bytes=BODY_LIMIT)
    received = bytearray()
    head = None
    for part in arrivals(data, split):
        received += part
        head = head or framing.cut_head(received)
    return head, bytes(received)


def cut_chunked(data: bytes, split: str) -> tuple[bytes, bytes]:
    """The pieces of a chunked body put together, and what is left behind them."""
    framing = Framing(max_head_bytes=HEAD_LIMIT, max_body_bytes=BODY_LIMIT)
    framing.begin_body(None)
    received = bytearray()
    pieces = b""
    for part in arrivals(data, split):
        received += part
        while len(pieces) < len(data) and (piece := framing.cut_body(received)) is not None:
            pieces += piece
    return pieces, bytes(received)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("head", [build("GET", "/"), build("GET", "/", "A: b\tc", "Empty:", "X: \xe9"), b"x\r\n\r\n"])
def test_a_head_is_cut_at_its_blank_line(head: bytes, split: str) -> None:
    cut, left = cut_head(head, split)
    assert cut == head
    assert left == (TAIL if split == "with a tail" else b"")


@pytest.mark.parametrize("split", SPLITS)
def test_line_ends_before_a_request_are_skipped(split: str) -> None:
    cut, _ = cut_head(b"\r\n\r\n" + build("GET", "/"), split)
    assert cut == build("GET", "/")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\tfolded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: \x0b\r\n\r\n",
        b"\n" + build("GET", "/"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_malformed_line_is_refused_as_soon_as_it_is_seen(head: bytes, split: str) -> None:
    with pytest.raises(InvalidRequest):
        cut_head(head, split)


@pytest.mark.parametrize("split", SPLITS)
def test_the_size_limit_is_the_same_however_the_head_arrives(split: str) -> None:
    head = build("GET", "/", "A: " + "a" * 100)
    assert cut_head(head, split, limit=len(head))[0] == head
    with pytest.raises(HeadersTooLarge):
        cut_head(head, split, limit=len(head) - 1)


@pytest.mark.parametrize("split", SPLITS)
def test_a_fault_inside_the_limit_is_found_before_the_limit_is(split: str) -> None:
    with pytest.raises(InvalidRequest):
        cut_head(b"GET / HTTP/1.1\r\n folded" + b"a" * HEAD_LIMIT, split)
    with pytest.raises(HeadersTooLarge):
        cut_head(b"GET / HTTP/1.1\r\nA:" + b"a" * HEAD_LIMIT + b"\r\n folded", split)


@pytest.mark.parametrize("split", SPLITS)
def test_the_number_of_headers_has_a_limit_of_its_own(split: str) -> None:
    fields = [f"A{index}:" for index in range(MAX_HEADERS)]
    assert cut_head(build("GET", "/", *fields[1:]), split, limit=10_000)[0]
    with pytest.raises(HeadersTooLarge):
        cut_head(build("GET", "/", *fields), split, limit=10_000)


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ((), 0),
        (("Content-Length: 0",), 0),
        (("content-LENGTH:\t 17 \t",), 17),
        (("Content-Length: 0005",), 5),
        (("Transfer-Encoding: chunked",), None),
        (("transfer-encoding:CHUNKED",), None),
        (("X-Content-Length: 9",), 0),
    ],
)
def test_a_head_says_how_long_its_body_is(headers: tuple[str, ...], length: int | None) -> None:
    assert body_length(build("POST", "/", *headers)) == length


@pytest.mark.parametrize(
    "value",
    [
        "+5",
        "5_0",
        "-1",
        "",
        " 5 5",
        "0x5",
        "5,5",
        "5, 5",
        "5;",
        "\u00b2",
        "9" * 20,
        "1" * 16_000,
        "5" + " " * 16_000 + "x",
    ],
)
def test_b039_a_length_is_a_plain_decimal_number(value: str) -> None:
    with pytest.raises(InvalidRequest):
        body_length(build("POST", "/", f"Content-Length: {value}"))


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "content-length: 5"),
        ("Content-Length: 0", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 0"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding:",),
    ],
)
def test_b040_a_body_has_one_length(headers: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        body_length(build("POST", "/", *headers))


def test_a_body_of_known_length_is_cut_as_it_arrives() -> None:
    framing = Framing(max_head_bytes=HEAD_LIMIT, max_body_bytes=BODY_LIMIT)
    framing.begin_body(5)
    received = bytearray(b"abc")
    assert framing.cut_body(received) == b"abc"
    assert framing.cut_body(received) is None
    received += b"deGET"
    assert framing.cut_body(received) == b"de"
    assert framing.cut_body(received) is None
    assert received == b"GET"


def test_a_length_above_the_limit_is_refused_at_once() -> None:
    framing = Framing(max_head_bytes=HEAD_LIMIT, max_body_bytes=BODY_LIMIT)
    framing.begin_body(BODY_LIMIT)
    with pytest.raises(PayloadTooLarge):
        framing.begin_body(BODY_LIMIT + 1)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "body",
    [
        chunked(),
        chunked(b"a"),
        chunked(b"abc", b"\r\n0\r\n\r\n"),
        b"00A\r\n0123456789\r\n000\r\n\r\n",
        b"1;name=value\r\na\r\n0 ; x\r\n\r\n",
        b"1\r\na\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n",
    ],
)
def test_a_chunked_body_is_cut_at_its_end(body: bytes, split: str) -> None:
    pieces, left = cut_chunked(body, split)
    assert pieces == body
    assert left == (TAIL if split == "with a tail" else b"")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "body",
    [
        b"+5\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"5_0\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"\r\n",
        b";a\r\n",
        b"5\n",
        b"5;a\rb\r\n",
        b"5;\x00\r\n",
        b"f" * 18 + b"\r\n",
        b"0" * MAX_CHUNK_LINE,
        b"1;" + b"a" * MAX_CHUNK_LINE + b"\r\n",
        b"0\r\nA: b\rc\r\n\r\n",
        b"0\r\nA: b\r\n folded\r\n\r\n",
    ],
)
def test_b039_a_malformed_chunk_is_refused(body: bytes, split: str) -> None:
    with pytest.raises(InvalidRequest):
        cut_chunked(body, split)


@pytest.mark.parametrize("split", SPLITS)
def test_a_chunked_body_meets_the_limit_at_the_chunk_that_passes_it(split: str) -> None:
    fits = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    assert cut_chunked(fits + b"0\r\n\r\n", split)[0]
    for chunk in (b"1\r\n", b"f" * 16 + b"\r\n"):
        with pytest.raises(PayloadTooLarge):
            cut_chunked(fits + chunk, split)


@pytest.mark.parametrize("split", SPLITS)
def test_trailers_meet_the_limit_of_headers(split: str) -> None:
    with pytest.raises(HeadersTooLarge):
        cut_chunked(b"0\r\nA: " + b"a" * HEAD_LIMIT + b"\r\n\r\n", split)


@pytest.mark.parametrize("split", SPLITS)
def test_a_body_of_very_small_chunks_is_refused(split: str) -> None:
    one = b"1\r\na\r\n"
    assert cut_chunked(one * CHUNKS_FREE + b"0\r\n\r\n", split)[0]
    with pytest.raises(InvalidRequest):
        cut_chunked(one * (CHUNKS_FREE * 2), split)


FRAGMENTS = st.sampled_from(
    [
        b"GET / HTTP/1.1",
        b"\r\n",
        b"\r",
        b"\n",
        b" ",
        b"\t",
        b"A: b",
        b"Host: x",
        b"\x00",
        b"a" * 40,
        b"\r\n\r\n",
        b"\xff",
        b"0",
        b"1",
        b"5;x",
        b"f" * 9,
        b"_",
        b"+1",
    ]
)


def outcome(data: bytes, sizes: list[int], *, is_body: bool) -> object:
    """What the framing says of ``data`` when it arrives in pieces of these sizes."""
    framing = Framing(max_head_bytes=120, max_body_bytes=64)
    if is_body:
        framing.begin_body(None)
    received, pieces, start = bytearray(), b"", 0
    try:
        for size in [*sizes, len(data)]:
            received += data[start : start + size]
            start += size
            while piece := (framing.cut_body(received) if is_body else framing.cut_head(received)):
                pieces += piece
                if not is_body:
                    return pieces
    except ApiError as error:
        return error.status, str(error)
    return pieces


@given(st.lists(FRAGMENTS, max_size=12).map(b"".join), st.lists(st.integers(1, 20), max_size=20), st.booleans())
def test_the_outcome_never_depends_on_how_the_bytes_were_split(data: bytes, sizes: list[int], is_body: bool) -> None:
    whole = outcome(data, [len(data)], is_body=is_body)
    assert outcome(data, sizes, is_body=is_body) == whole
    assert outcome(data, [1] * len(data), is_body=is_body) == whole

"""Where one request ends and the next begins, decided on the bytes alone.

h11 parses what is cut here and keeps the state of the connection. It is more lenient than a server behind
a proxy can be (bare line feeds, folded lines, repeated lengths), and its bound on headers depends on how
the bytes were split over reads. So it is given one whole head, or one piece of a body, at a time:

Rule 1: a piece is cut when it is complete and has passed; h11 never waits for more of a head.
Rule 2: the outcome depends on the bytes received, never on how they were split.
Rule 3: each byte is looked at a bounded number of times, and nothing is converted to an integer before
        its number of digits is known to be small.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tlserve.errors import HeadersTooLarge, InvalidRequest, PayloadTooLarge
from tlserve.http.limits import CHUNK_BYTES, CHUNKS_FREE, MAX_CHUNK_LINE, MAX_HEADERS

_END_OF_HEAD: Final = b"\r\n\r\n"

# A carriage return or line feed on its own, a folded line, a control character. A CR that ends what has
# arrived may still get its LF.
_BAD_LINES: Final = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n|\r\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LOOK_BACK: Final = 3  # bytes before the new ones that a match of either may begin in

_FRAMING_HEADER: Final = re.compile(
    rb"^(?P<name>content-length|transfer-encoding):(?P<value>[^\r]*)\r$", re.IGNORECASE | re.MULTILINE
)
_LENGTH: Final = re.compile(rb"[0-9]{1,19}")
# 16 digits are 64 bits; an extension may hold any printable byte.
_CHUNK_LINE: Final = re.compile(rb"(?P<size>[0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")


def body_length(head: bytes) -> int | None:
    """The length of the body that a head announces, None for a chunked one.

    Raises InvalidRequest when the head leaves any doubt: more than one framing header, a length that is
    not a plain decimal number, or a transfer coding other than chunked.
    """
    found = [(match["name"].lower(), match["value"].strip(b" \t")) for match in _FRAMING_HEADER.finditer(head)]
    if not found:
        return 0
    if len(found) > 1:
        raise InvalidRequest("the length of the body is given more than once")
    name, value = found[0]
    if name == b"transfer-encoding":
        if value.lower() != b"chunked":
            raise InvalidRequest("Transfer-Encoding must be chunked")
        return None
    if not _LENGTH.fullmatch(value):
        raise InvalidRequest("Content-Length must be one decimal number of at most 19 digits")
    return int(value)


class Framing:
    """Cuts the pieces of one request off the front of what has been received."""

    def __init__(self, *, max_head_bytes: int, max_body_bytes: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._num_searched = 0  # bytes at the front that hold neither the end of a block nor a fault
        self._num_left = 0  # bytes of the body or chunk still to come, line end of the chunk included
        self._num_body_bytes = 0
        self._num_chunks = 0
        self._cut: Callable[[bytearray], bytes | None] = self._cut_length

    def cut_head(self, received: bytearray) -> bytes | None:
        """The request line and headers, or None when they have not all arrived.

        Raises InvalidRequest for malformed lines, HeadersTooLarge for too many.
        """
        # Clients of old send a line end after a body; RFC 9112 section 2.2 lets it pass.
        while self._num_searched == 0 and received.startswith(b"\r\n"):
            del received[:2]
        return None if received == b"\r" else self._cut_block(received)

    def begin_body(self, length: int | None) -> None:
        """Says what follows the head; raises PayloadTooLarge for a length that will not be read."""
        self._num_left = length or 0
        if self._num_left > self._max_body_bytes:
            raise self._too_large()
        self._cut = self._cut_chunk_line if length is None else self._cut_length

    def cut_body(self, received: bytearray) -> bytes | None:
        """The next piece of the body with its framing, or None when there is none yet.

        Raises InvalidRequest for malformed chunks, PayloadTooLarge for too many bytes.
        """
        return self._cut(received)

    def _cut_block(self, received: bytearray) -> bytes | None:
        limit = self._max_head_bytes
        start = max(0, self._num_searched - _LOOK_BACK)
        found = received.find(_END_OF_HEAD, start, limit)
        end = len(received) if found < 0 else found + len(_END_OF_HEAD)
        if _BAD_LINES.search(received, start, min(end, limit)):
            raise InvalidRequest("a line of the headers is malformed")
        if found < 0 and end >= limit:
            raise HeadersTooLarge(f"the headers of a request may have {limit} bytes")
        if found < 0:
            self._num_searched = end
            return None
        self._num_searched = 0
        block = _take(received, end)
        if block.count(b"\n") - 2 > MAX_HEADERS:
            raise HeadersTooLarge(f"a request may have {MAX_HEADERS} headers")
        return block

    def _cut_length(self, received: bytearray) -> bytes | None:
        piece = _take(received, min(self._num_left, len(received)))
        self._num_left -= len(piece)
        return piece or None

    def _cut_chunk_line(self, received: bytearray) -> bytes | None:
        end = received.find(b"\n", 0, MAX_CHUNK_LINE) + 1
        if end == 0:
            if len(received) >= MAX_CHUNK_LINE:
                raise InvalidRequest(f"the first line of a chunk may have {MAX_CHUNK_LINE} bytes")
            return None
        line = _CHUNK_LINE.fullmatch(received, 0, end)
        if line is None:
            raise InvalidRequest("the size of a chunk must be a plain hexadecimal number")
        self._count_chunk(int(line["size"], 16))
        return _take(received, end)

    def _count_chunk(self, size: int) -> None:
        if size == 0:
            self._cut = self._cut_trailers
            return
        self._num_body_bytes += size
        if self._num_body_bytes > self._max_body_bytes:
            raise self._too_large()
        self._num_chunks += 1
        if self._num_chunks > CHUNKS_FREE + self._num_body_bytes // CHUNK_BYTES:
            raise InvalidRequest(f"chunks must have {CHUNK_BYTES} bytes on average")
        self._num_left = size + 2
        self._cut = self._cut_chunk_data

    def _cut_chunk_data(self, received: bytearray) -> bytes | None:
        piece = self._cut_length(received)
        if self._num_left == 0:
            self._cut = self._cut_chunk_line
        return piece

    def _cut_trailers(self, received: bytearray) -> bytes | None:
        if self._num_searched == 0 and received.startswith(b"\r\n"):
            return _take(received, 2)
        return None if received == b"\r" else self._cut_block(received)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body of a request may have {self._max_body_bytes} bytes")


def _take(received: bytearray, count: int) -> bytes:
    piece = bytes(received[:count])
    del received[:count]
    return piece

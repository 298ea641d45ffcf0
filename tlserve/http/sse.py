"""Server-sent events: the bytes of one event, and what surrounds a stream of them."""

from __future__ import annotations

from typing import Final

from tlserve.http.messages import Header

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

SSE_HEADERS: Final[tuple[Header, ...]] = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("X-Accel-Buffering", "no"),  # nginx would otherwise hold events back until its buffer is full
)

# U+0085, U+2028 and U+2029 in UTF-8. Clients that split lines as Unicode does would cut an event there.
# In JSON they can only stand inside a string, where an escape means the same.
_LINE_BREAKS: Final = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


def event(payload: bytes) -> bytes:
    """One event that carries one JSON document (UTF-8, without raw line ends)."""
    if not payload.isascii():
        for raw, escape in _LINE_BREAKS:
            payload = payload.replace(raw, escape)
    return b"data: %b\n\n" % payload


def values_of_data(event: bytes) -> list[bytes]:
    """What the lines of data of an event say, which stand in any order among its other fields and comments.

    ``event`` is without the blank line at its end; its lines end with line feeds.
    """
    fields = (line.partition(b":") for line in event.split(b"\n"))  # a comment has an empty name
    return [value.lstrip(b" ") for name, _, value in fields if name == b"data"]

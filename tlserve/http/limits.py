"""How much and how long: every bound on what a peer may send, hold or delay. docs/http.md has the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds an operator may set. Sizes are in bytes, times in seconds."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 16 * 1024  # request line, headers and the blank line; trailers likewise
    header_timeout: float = 10.0  # from the first byte of a request to the end of its headers
    body_timeout: float = 30.0  # from there to the end of its body
    idle_timeout: float = 75.0  # from a response to the first byte of the next request
    write_timeout: float = 30.0  # for the peer to take SEND_SIZE bytes
    max_connections: int = 1024

    @property
    def max_ahead_bytes(self) -> int:
        """What a peer may send ahead while an answer is under way: one whole request."""
        return self.max_header_bytes + self.max_body_bytes

    @property
    def max_bodies_bytes(self) -> int:
        """What the bodies of all requests of a server may take together."""
        return LARGEST_BODIES * self.max_body_bytes


MAX_HEADERS: Final = 100  # lines; each costs some microseconds, so bytes alone do not bound the work
MAX_CHUNK_LINE: Final = 256  # bytes of a chunk's size and extensions

# Small chunks cost far more work than their bytes: after the first CHUNKS_FREE of them, a body
# must bring CHUNK_BYTES bytes for each.
CHUNKS_FREE: Final = 1024
CHUNK_BYTES: Final = 64
CHUNKS_PER_TURN: Final = 64  # pieces of a body that are read before other tasks get their turn

# A thousand connections may each hold a body of the largest size; a machine need not have memory for that.
LARGEST_BODIES: Final = 64  # of max_body_bytes each, that all connections together have room for
FREE_BODY_BYTES: Final = 16 * 1024  # of each body, which do not count

RECEIVE_SIZE: Final = 64 * 1024  # bytes asked of the socket at once
SEND_SIZE: Final = 256 * 1024  # bytes given to the socket under one write deadline

# A response that refuses unread input is lost if the socket is closed on that input (the peer's kernel
# drops what it has not read when it sees the reset), so input is read and thrown away for a while.
LINGER_QUIET: Final = 0.5  # seconds without a byte that end the wait
LINGER_TIMEOUT: Final = 5.0  # seconds that end it in any case
CLOSE_TIMEOUT: Final = 1.0  # seconds for the closing words of TLS

REFUSAL_TIMEOUT: Final = 1.0  # seconds for the request that a connection is about to be refused
MAX_REFUSALS: Final = 64  # connections above max_connections that are told why; more are only closed

ACCEPT_PAUSE: Final = 0.1  # seconds until a machine without room for a connection is asked again
COMPLAINT_INTERVAL: Final = 60.0  # seconds without a shortage after which the next one is news

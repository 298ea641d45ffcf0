"""What is known of a request once it has ended: the material of its one line in the log."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tlserve.http.messages import Note


class Outcome(enum.Enum):
    COMPLETE = "complete"  # the whole response was handed to the socket
    CLIENT_LEFT = "client_left"  # the peer closed or reset the connection first
    WRITE_TIMEOUT = "write_timeout"  # the peer stopped reading
    FAILED = "failed"  # a started response was ended by an error event


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request. No field holds text of the client's that could forge a line: the method is a
    token, the request id has its own alphabet, and the route is the pattern that matched, never the path."""

    server: str
    request_id: str
    method: str  # "" when no request line was understood
    route: str  # "" when no route matched
    status: int | None  # None when no response was started
    duration: float  # seconds from the first byte of the request
    outcome: Outcome
    notes: dict[str, Note]

"""What a handler is given and what it answers with. Nothing here knows sockets or h11."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tlserve.errors import ApiError

if TYPE_CHECKING:
    from tlserve.http.trace import Trace

Header = tuple[str, str]
Note = str | int | float | None


@dataclass(frozen=True, slots=True)
class Request:
    """One complete request. Header names are lower case; values are ISO-8859-1 text as received."""

    method: str
    path: str  # percent-decoded once, query removed
    query: str
    headers: tuple[Header, ...]
    body: bytes
    request_id: str  # the client's own X-Request-Id when it is well formed, else a fresh one
    path_params: dict[str, str] = field(default_factory=dict)  # filled in by the router
    raw_path: str = ""  # the path as received, where it held escapes; "" otherwise
    notes: dict[str, Note] = field(default_factory=dict)  # what the request's line in the log will add
    trace: Trace | None = None  # None where none is made

    def header(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer. Content-Length, Date, Connection and X-Request-Id are the connection's to add."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = (("Content-Type", "application/json"),)


class Reply(Protocol):
    """How a handler answers: ``send`` once, or ``start`` and then any number of ``write``.

    Each call waits for the peer under the write deadline. When the peer is gone, or the deadline
    passes, the handler is cancelled; it never sees an exception of the socket.
    """

    @property
    def is_started(self) -> bool: ...

    async def send(self, response: Response) -> None: ...

    async def start(self, status: int, headers: tuple[Header, ...]) -> None: ...

    async def write(self, data: bytes) -> None: ...


Handler = Callable[[Request, Reply], Awaitable[None]]

# The headers that every answer to a request carries beside its own; sees the request before its body is read.
HeadersFor = Callable[[Request], tuple[Header, ...]]

# Looks at a request before its body is read (``body`` is empty) and raises the ApiError that refuses it.
Check = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class ErrorRenderer:
    """How errors look, before and after a response has started; given to the connection by the application."""

    response: Callable[[ApiError], Response]
    event: Callable[[ApiError], bytes]  # written into a started stream before it is closed

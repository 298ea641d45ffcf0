"""The answer to one request: from Response, or start and write, to bytes.

Rule 1: h11 is asked first, then the bytes are sent; each event of a stream is one write to the socket.
        A cancelled handler is stopped before h11 is asked, so what h11 counts as sent was at least begun.
Rule 2: a handler never sees an exception of the socket. When the peer is gone the scope around the
        handler is cancelled, so the next checkpoint ends it; what it writes until then goes nowhere.
Rule 3: a response that breaks after it has started ends with one error event. Its framing is then
        completed, so that a client reads the event and not a broken body; a stream that ends well is told
        by its own last event, never by the end of the body.
"""

from __future__ import annotations

import contextlib
from email.utils import formatdate
from http.client import responses as REASONS
from typing import Final

import h11
import trio

from tlserve.http.messages import Header, Response
from tlserve.http.peer import Peer, PeerLeft

_UNFINISHED: Final = (h11.IDLE, h11.SEND_BODY, h11.ERROR)


class HttpReply:
    """Implements messages.Reply on a connection's h11 state and its peer."""

    def __init__(self, protocol: h11.Connection, peer: Peer, request_id: str) -> None:
        self.request_id = request_id
        self.common_headers: tuple[Header, ...] = ()  # on this answer whether it is well or an error
        self.status: int | None = None
        self.is_last = False  # set to announce that the connection closes after this answer
        self.has_failed = False
        self.is_lost = False  # something of the answer was not handed to the socket
        self._protocol = protocol
        self._peer = peer
        self._is_head = False

    @property
    def is_started(self) -> bool:
        return self.status is not None

    @property
    def is_complete(self) -> bool:
        return self.is_started and self._protocol.our_state is not h11.SEND_BODY

    def omit_body(self) -> None:
        """Answers HEAD: the headers are those of GET, and no body follows."""
        self._is_head = True

    async def send(self, response: Response) -> None:
        """Answers with a whole response, under the write deadline."""
        await trio.lowlevel.checkpoint_if_cancelled()
        headers = response.headers
        if response.status != 204:
            headers = (*headers, ("Content-Length", str(len(response.body))))
        parts = [self._start(response.status, headers)]
        if response.body and not self._is_head:
            parts.append(self._encode(h11.Data(data=response.body)))
        parts.append(self._encode(h11.EndOfMessage()))
        await self._deliver(b"".join(parts))

    async def start(self, status: int, headers: tuple[Header, ...]) -> None:
        """Sends the headers of a body whose length is not known yet."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._deliver(self._start(status, headers))

    async def write(self, data: bytes) -> None:
        """Sends a part of the body."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._is_head:
            await self._deliver(self._encode(h11.Data(data=data)))

    async def finish(self) -> None:
        """Ends a body that was written in parts; nothing to do where ``send`` has answered."""
        if not self.is_complete:
            with contextlib.suppress(PeerLeft):  # who leaves now has the whole answer
                await self._peer.send(self._encode(h11.EndOfMessage()))

    async def fail(self, event: bytes) -> None:
        """Ends a started body with an error event."""
        self.has_failed = True
        last = b"" if self._is_head else self._encode(h11.Data(data=event))
        await self._deliver(last + self._encode(h11.EndOfMessage()))

    def _start(self, status: int, headers: tuple[Header, ...]) -> bytes:
        if self.is_started:
            raise RuntimeError("a request was answered twice")
        date = ("Date", formatdate(usegmt=True))
        own: list[Header] = [date, ("X-Request-Id", self.request_id), *self.common_headers]
        # Where the request has not been read to its end, nobody can tell where the next one begins.
        if self.is_last or self._protocol.their_state in _UNFINISHED:
            own.append(("Connection", "close"))
        reason = REASONS.get(status, "")
        data = self._encode(h11.Response(status_code=status, reason=reason, headers=[*own, *headers]))
        self.status = status
        return data

    def _encode(self, event: h11.Event) -> bytes:
        return encode(self._protocol, event)

    async def _deliver(self, data: bytes) -> None:
        try:
            await self._peer.send(data)
        except PeerLeft:
            self.is_lost = True
            await trio.lowlevel.checkpoint()


def encode(protocol: h11.Connection, event: h11.Event) -> bytes:
    data = protocol.send(event)
    assert data is not None  # only ConnectionClosed has no bytes
    return data

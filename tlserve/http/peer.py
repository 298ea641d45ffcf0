"""The other end of a connection: what it has sent, whether it is still there, and how it is let go.

Rule 1: one task reads, for as long as the connection lives. That is how a peer that leaves is noticed at
        any moment, also when nothing is being written.
Rule 2: end of file means that the peer has left. A client that only half-closes gets no answer.
Rule 3: every wait on the peer has a deadline, here or in the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
from collections.abc import Iterator

import trio

from tlserve.http.access import Outcome
from tlserve.http.limits import (
    CLOSE_TIMEOUT,
    LINGER_QUIET,
    LINGER_TIMEOUT,
    RECEIVE_SIZE,
    SEND_SIZE,
)

# The C library's own send: Python's passes no flags by way of trio, and in a program that leaves SIGPIPE at its default
# a peer that resets its connection would end the process.
_SEND = ctypes.CDLL(None, use_errno=True).send
_SEND.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_SEND.restype = ctypes.c_ssize_t
_SEND_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)  # systems without it have another way


class PeerLeft(Exception):
    """Nothing more can be read from the peer or written to it."""


class Peer:
    """Wraps a stream. ``send``, ``more`` and ``aclose`` are for one task; ``read_forever`` is a task of its own.

    ``received`` is consumed from its front by the caller. Reading pauses while it holds more than
    ``max_ahead_bytes``, except during an answer: there a pause would hide that the peer leaves, so a peer
    that sends so much ahead is treated as one that left.
    """

    def __init__(self, stream: trio.abc.Stream, *, write_timeout: float, max_ahead_bytes: int) -> None:
        self.received = bytearray()
        self.departure: Outcome | None = None  # how the peer left; None while it is there
        self.write_timeout = write_timeout
        self._stream = stream
        self._max_ahead_bytes = max_ahead_bytes
        self._arrival = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._dependent: trio.CancelScope | None = None

    async def handshake(self) -> None:
        """Completes the TLS handshake, where there is one. A peer that fails it, or has no more time, has left."""
        if not isinstance(self._stream, trio.SSLStream):
            return
        try:
            await self._stream.do_handshake()
        except trio.BrokenResourceError:
            self._leave(Outcome.CLIENT_LEFT)
        except trio.Cancelled:
            self._leave(Outcome.CLIENT_LEFT)
            raise

    async def read_forever(self) -> None:
        """Collects what arrives; returns once the peer has left."""
        try:
            while data := await self._stream.receive_some(RECEIVE_SIZE):
                self.received += data
                self._arrival.unpark_all()
                if self._is_too_far_ahead():
                    if self._dependent is not None:
                        break
                    await self._room.park()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._leave(Outcome.CLIENT_LEFT)

    async def more(self) -> None:
        """Waits until more has arrived; raises PeerLeft when no more will."""
        if self.departure is None:
            self._room.unpark_all()
            await self._arrival.park()
        if self.departure is not None:
            raise PeerLeft

    @contextlib.contextmanager
    def cancel_when_left(self) -> Iterator[trio.CancelScope]:
        """A cancel scope that ends when the peer leaves. Only one is open at a time."""
        with trio.CancelScope() as scope:
            self._dependent = scope
            self._room.unpark_all()
            if self._is_too_far_ahead():
                self._leave(Outcome.CLIENT_LEFT)
            elif self.departure is not None:
                scope.cancel()
            try:
                yield scope
            finally:
                self._dependent = None

    async def send(self, data: bytes) -> None:
        """Writes everything, each SEND_SIZE bytes under the write deadline; raises PeerLeft when it cannot."""
        if len(data) <= SEND_SIZE:
            await self._send_piece(data)
            return
        for start in range(0, len(data), SEND_SIZE):
            await self._send_piece(data[start : start + SEND_SIZE])

    async def aclose(self, *, linger: bool) -> None:
        """Closes the stream; with ``linger`` only after the peer has had time to read what was sent last."""
        try:
            if self.departure is None:
                if linger:
                    await self._linger()
                with trio.move_on_after(CLOSE_TIMEOUT), contextlib.suppress(trio.BrokenResourceError):
                    await self._stream.aclose()
        finally:
            await trio.aclose_forcefully(self._stream)

    def _is_too_far_ahead(self) -> bool:
        return len(self.received) > self._max_ahead_bytes

    async def _send_piece(self, data: bytes) -> None:
        if self.departure is not None:
            raise PeerLeft
        rest = data[self._send_at_once(data) :]
        if not rest:
            return
        with trio.move_on_after(self.write_timeout):
            try:
                await self._stream.send_all(rest)
                return  # also when the peer was seen to leave meanwhile: it may have left with all it wanted
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._leave(Outcome.CLIENT_LEFT)
            except trio.Cancelled:
                # Nobody knows how much was sent, so nothing can be sent behind it.
                self._leave(Outcome.WRITE_TIMEOUT)
                raise
        raise PeerLeft

    def _send_at_once(self, data: bytes) -> int:
        """How many bytes went out without waiting: of an event nearly always all.

        They cost neither a deadline nor a visit to the event loop, which is half of what an event costs.
        """
        if not isinstance(self._stream, trio.SocketStream):
            return 0
        sent: int = _SEND(self._stream.socket.fileno(), data, len(data), _SEND_FLAGS)
        if sent < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            self._leave(Outcome.CLIENT_LEFT)
            raise PeerLeft
        return max(sent, 0)

    async def _linger(self) -> None:
        self.received.clear()
        with trio.move_on_after(LINGER_TIMEOUT), contextlib.suppress(trio.BrokenResourceError):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            is_talking = True
            while is_talking:
                is_talking = False
                with trio.move_on_after(LINGER_QUIET):
                    is_talking = bool(await self._stream.receive_some(RECEIVE_SIZE))

    def _leave(self, how: Outcome) -> None:
        if self.departure is None:
            self.departure = how
        self._arrival.unpark_all()
        if self._dependent is not None:
            self._dependent.cancel()

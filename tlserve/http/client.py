"""The other side of HTTP/1.1: one connection that asks, one request at a time, and reads replies piece by piece."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
import trio

from tlserve.http.limits import RECEIVE_SIZE
from tlserve.http.messages import Header

LATEST = 1.0  # seconds until what has come is looked into in any case
MAX_REPLY = 8 << 20  # bytes of a reply that is read whole; none that a client asks for is near it
_DEFAULT_PORTS = {"http": 80, "https": 443}


_URL_TEXT = re.compile(r"[!-~]*")
_HOST_NAME = re.compile(r"(?=.{1,254}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)


class ConnectionFailed(Exception):
    """There is no connection, it broke, or what came is not HTTP. The message says which."""


def _is_host(host: str) -> bool:
    """Whether it can be looked up: labels of up to 63 characters, or an IPv6 address."""
    try:
        return bool(_HOST_NAME.fullmatch(host) or ipaddress.IPv6Address(host))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is, and the path that its routes begin with."""

    host: str
    port: int
    is_tls: bool
    path: str  # without a slash at its end

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Raises ValueError for anything but an http or https URL of a host, perhaps a port, and a path."""
        if not _URL_TEXT.fullmatch(url):  # urlsplit leaves line ends out and says nothing
            raise ValueError(f"{url!r} is not a URL: it is ASCII without spaces")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        if not _is_host(parts.hostname):
            raise ValueError(f"{url!r}: {parts.hostname!r} is neither a host name nor an IP address")
        if port == 0:
            raise ValueError(f"{url!r}: a port is from 1 to 65535")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"{url!r}: it may have no user, query or fragment")
        return cls(
            parts.hostname, port or _DEFAULT_PORTS[parts.scheme], parts.scheme == "https", parts.path.rstrip("/")
        )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class ClientConnection:
    """A keep-alive connection, for one task. Every method but ``aclose`` may raise ConnectionFailed."""

    def __init__(self, stream: trio.abc.Stream, origin: Origin) -> None:
        self._stream = stream
        self._origin = origin
        self._h11 = h11.Connection(h11.CLIENT)
        self._has_ended = False  # the server has closed its side
        self._needs_data = False  # all that was received has been looked at
        self._last = b""  # bytes received
        self._failure: ConnectionFailed | None = None  # for the next call, as there were pieces before it
        self.headers: tuple[Header, ...] = ()  # of the last reply; names in lower case

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent: the last reply was read to its end and both sides keep alive."""
        is_idle = self._h11.our_state in (h11.IDLE, h11.DONE) and self._h11.their_state in (h11.IDLE, h11.DONE)
        return is_idle and not self._has_ended

    async def request(self, method: str, path: str, headers: tuple[Header, ...] = (), body: bytes = b"") -> int:
        """Send a request for a path below the origin's; returns the status of its reply."""
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        fields = [("Host", self._origin.authority), *headers, ("Content-Length", str(len(body)))]
        head = h11.Request(method=method, target=self._origin.path + path, headers=fields)
        data = [self._h11.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        try:
            await self._stream.send_all(b"".join(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionFailed("the server closed the connection") from None
        while True:
            event = self._next_event()
            if isinstance(event, h11.Response):
                self.headers = tuple((name.decode(), value.decode("latin-1")) for name, value in event.headers)
                return event.status_code
            if self._needs_data:
                await self._receive()

    async def read(self) -> bytes:
        """What has come of the body, waiting for some when there is none; b"" at its end."""
        piece = b""
        while not piece and self._h11.their_state is h11.SEND_BODY:
            if self._needs_data:
                await self._receive()
            piece = self._parsed()
        return piece

    async def read_late(self) -> list[tuple[float, bytes]]:
        """Some pieces of the body, each with the time when it came; none at the body's end.

        For who measures a server from the same cores: what comes is only looked into once the body may have ended
        with it, or when it is much, or after a second.
        """
        if self._failure is not None:
            raise self._failure
        if piece := self._parsed():  # it came with the head
            return [(trio.current_time(), piece)]
        found: list[tuple[float, bytes]] = []
        while not found and self._h11.their_state is h11.SEND_BODY:
            arrivals = await self._collect()
            try:
                for time, data in arrivals:
                    self._accept(data)
                    if piece := self._parsed():
                        found.append((time, piece))
            except ConnectionFailed as error:
                if not found:
                    raise
                self._failure = error
        return found

    async def read_all(self, limit: int = MAX_REPLY) -> bytes:
        """The rest of the body, of up to ``limit`` bytes. How long it may take is the caller's matter."""
        body = bytearray()
        while piece := await self.read():
            body += piece
            if len(body) > limit:
                raise ConnectionFailed(f"the reply is longer than {limit} bytes")
        return bytes(body)

    async def aclose(self) -> None:
        """Close at once, whatever is in flight."""
        await trio.aclose_forcefully(self._stream)

    def _next_event(self) -> object:
        has_begun = self._h11.their_state is h11.SEND_BODY
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if self._has_ended:
                what = "broke off the answer" if has_begun else "closed the connection"
                raise ConnectionFailed(f"the server {what}") from None
            raise ConnectionFailed(f"the reply is not valid HTTP: {error}") from None
        self._needs_data = event is h11.NEED_DATA
        return event

    def _parsed(self) -> bytes:
        """What was received of the body and not looked at yet."""
        pieces: list[bytes] = []
        while self._h11.their_state is h11.SEND_BODY and not self._needs_data:
            event = self._next_event()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
        return b"".join(pieces)

    async def _collect(self) -> list[tuple[float, bytes]]:
        """What is received, and when, until a body of chunks may have ended: its last bytes are two line ends."""
        is_chunked = ("transfer-encoding", "chunked") in self.headers
        arrivals: list[tuple[float, bytes]] = []
        num_bytes = 0
        with trio.move_on_after(LATEST):
            while num_bytes <= RECEIVE_SIZE:
                try:
                    data = await self._receive_some()
                except ConnectionFailed:
                    if not arrivals:
                        raise
                    data = b""  # the end, as if it had been closed
                arrivals.append((trio.current_time(), data))
                num_bytes += len(data)
                if not data or not is_chunked or self._last == b"\r\n\r\n":
                    break
        return arrivals

    async def _receive(self) -> None:
        self._accept(await self._receive_some())

    async def _receive_some(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(RECEIVE_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionFailed("the server closed the connection") from None
        self._last = (self._last + data)[-4:]
        return data

    def _accept(self, data: bytes) -> None:
        self._has_ended = not data
        self._needs_data = False
        self._h11.receive_data(data)


async def connect(origin: Origin) -> ClientConnection:
    """Open a connection; the caller closes it. Raises ConnectionFailed."""
    return ClientConnection(await open_stream(origin), origin)


async def open_stream(origin: Origin) -> trio.abc.Stream:
    """The bytes below a connection, for who writes HTTP by hand. Raises ConnectionFailed."""
    try:
        if not origin.is_tls:
            return await trio.open_tcp_stream(origin.host, origin.port)
        context = ssl.create_default_context()
        return await trio.open_ssl_over_tcp_stream(origin.host, origin.port, ssl_context=context, https_compatible=True)
    except OSError as error:
        raise ConnectionFailed(f"cannot connect to {origin.authority}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    """The system's own word; trio makes one error of those that the addresses of a host have given."""
    if isinstance(error.__cause__, ExceptionGroup):
        causes = [cause for cause in error.__cause__.exceptions if isinstance(cause, OSError)]
        return ", ".join(dict.fromkeys(os.strerror(cause.errno) for cause in causes if cause.errno)) or str(error)
    return error.strerror or str(error)

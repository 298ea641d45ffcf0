"""One connection: h11 on one side, the peer on the other, a handler called for each request between them.

Rule 1: requests are answered one after the other, in the order they came.
Rule 2: a request is handed over whole. What refuses it without its body (route, drain, size) is raised
        before the body is read, and before a client that expects it is told to continue.
Rule 3: a fault in a request ends the connection, because nobody can tell where the next one begins.
Rule 4: every exception that is not an ApiError meets one ``except``, in ``run``.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import h11
import trio

from tlserve.errors import ApiError, InternalFault, InvalidRequest, NoCapacity, RequestTimeout, VersionNotSupported
from tlserve.http.access import Outcome, RequestRecord
from tlserve.http.bodies import Bodies, Body
from tlserve.http.framing import Framing, body_length
from tlserve.http.limits import CHUNKS_PER_TURN, REFUSAL_TIMEOUT, Limits
from tlserve.http.messages import Check, ErrorRenderer, Handler, HeadersFor, Note, Request
from tlserve.http.peer import Peer, PeerLeft
from tlserve.http.reply import HttpReply, encode
from tlserve.http.request_id import fresh_request_id, request_id_of
from tlserve.http.target import check_host, parse_target
from tlserve.http.trace import BeginTrace, Trace

logger: Final = logging.getLogger("tlserve.http")


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections of a server have in common."""

    name: str
    handler: Handler
    errors: ErrorRenderer
    limits: Limits
    bodies: Bodies
    check: Check
    headers_for: HeadersFor
    on_finish: Callable[[RequestRecord], None]
    begin_trace: BeginTrace | None = None  # None: no request is followed


class State(enum.Enum):
    NEW = "new"  # nothing has arrived yet
    IDLE = "idle"  # between requests
    READING = "reading"  # a request has begun to arrive
    ANSWERING = "answering"  # the handler runs
    CLOSING = "closing"


@dataclass(slots=True)
class _Exchange:
    """One request and its answer."""

    reply: HttpReply
    body: Body
    began: float  # trio.current_time() at the first byte
    method: str = ""
    notes: dict[str, Note] = field(default_factory=dict)
    trace: Trace | None = None
    is_abandoned: bool = False  # the handler was cancelled because the peer had left


class Connection:
    """Serves one stream until it is closed.

    Cancelling ``run`` closes the stream at once and with it ends the handler. ``refuse`` and ``cut`` are
    synchronous and idempotent; they are how a server drains.
    """

    def __init__(self, stream: trio.abc.Stream, service: Service) -> None:
        limits = service.limits
        self.state = State.NEW
        self._service = service
        self._limits = limits
        self._peer = Peer(stream, write_timeout=limits.write_timeout, max_ahead_bytes=limits.max_ahead_bytes)
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_header_bytes)
        self._framing = self._new_framing()
        self._exchange: _Exchange | None = None
        self._fault: Exception | None = None
        self._refusal: ApiError | None = None
        self._refused_at = math.inf  # trio time at which a connection that is refused stops reading
        self._read_scope: trio.CancelScope | None = None
        self._handler_scope: trio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.state.value}, {len(self._peer.received)} bytes unread>"

    def refuse(self, error: ApiError) -> None:
        """Answers every later request with ``error`` and closes; an idle connection closes at once.

        The answer under way is finished, and says ``Connection: close`` where it has not started yet.
        """
        if self._refusal is not None:
            return
        self._refusal = error
        is_idle = self.state is State.IDLE and not self._peer.received
        self._refused_at = trio.current_time() + (0.0 if is_idle else REFUSAL_TIMEOUT)
        if self._exchange is not None:
            self._exchange.reply.is_last = True
        if self._read_scope is not None:
            self._read_scope.deadline = min(self._read_scope.deadline, self._refused_at)

    def cut(self, error: ApiError) -> None:
        """Ends the answer under way with ``error``, within REFUSAL_TIMEOUT, and closes."""
        self.refuse(error)
        self._peer.write_timeout = REFUSAL_TIMEOUT
        if self._handler_scope is not None:
            self._handler_scope.cancel()

    async def run(self) -> None:
        """Serves the connection to its end. Raises nothing but what cancels it or ends the process."""
        for step in (self._serve, self._admit_fault, self._close):
            try:
                await step()
            except* Exception as group:
                self._fault = _innermost(group)
                request_id = self._exchange.reply.request_id if self._exchange else "-"
                logger.error("%s: request %s failed", self._service.name, request_id, exc_info=self._fault)

    async def _serve(self) -> None:
        with self._reading(self._limits.header_timeout):
            await self._peer.handshake()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._peer.read_forever)
            with contextlib.suppress(PeerLeft):
                while await self._serve_one():
                    pass
            nursery.cancel_scope.cancel()

    async def _admit_fault(self) -> None:
        if self._fault is not None and self._exchange is not None:
            self._exchange.reply.is_last = True
            request_id = self._exchange.reply.request_id
            await self._conclude(self._exchange, InternalFault(f"internal error; the log has it under {request_id}"))

    async def _close(self) -> None:
        is_quiet = self.state in (State.NEW, State.IDLE)
        self.state = State.CLOSING
        await self._peer.aclose(linger=not is_quiet)

    async def _serve_one(self) -> bool:
        """Reads one request and answers it; returns whether another may follow."""
        if not await self._is_request_coming():
            return False
        self.state = State.READING
        exchange = self._exchange = self._new_exchange()
        try:
            await self._conclude(exchange, await self._read_and_handle(exchange))
        finally:
            exchange.body.drop()
        return not exchange.reply.has_failed and self._start_next_cycle()

    async def _read_and_handle(self, exchange: _Exchange) -> ApiError | None:
        """Returns what ended the exchange before its answer was whole, if anything did."""
        try:
            request = await self._read_request(exchange)
        except ApiError as error:
            return error
        self.state = State.ANSWERING
        return await self._call_handler(request, exchange)

    # Reading a request

    async def _is_request_coming(self) -> bool:
        is_new = self.state is State.NEW
        with self._reading(self._limits.header_timeout if is_new else self._limits.idle_timeout):
            while not self._peer.received:
                await self._peer.more()
            return True
        # A client that is being refused is told so, unless it may be a pool that keeps an idle connection.
        return is_new and self._refusal is not None

    async def _read_request(self, exchange: _Exchange) -> Request:
        request, length = self._parse_head(await self._read_head(), exchange)
        exchange.reply.common_headers = self._service.headers_for(request)
        if self._service.begin_trace is not None:
            exchange.trace = self._service.begin_trace(request, exchange.began)
        if exchange.trace is not None:
            exchange.reply.common_headers += exchange.trace.headers
        if self._refusal is not None:
            raise self._refusal
        self._framing.begin_body(length)
        refusal: ApiError | None = None
        try:
            self._service.check(request)
        except ApiError as error:
            refusal = error
        if self._protocol.they_are_waiting_for_100_continue:
            if refusal is not None:
                raise refusal
            await self._peer.send(encode(self._protocol, h11.InformationalResponse(status_code=100, headers=[])))
        body = await self._read_body(exchange.body, refusal)
        return replace(request, body=body, trace=exchange.trace)

    async def _read_head(self) -> bytes:
        with self._reading(self._limits.header_timeout):
            while (head := self._framing.cut_head(self._peer.received)) is None:
                await self._peer.more()
            return head
        raise self._overdue("headers", self._limits.header_timeout)

    def _parse_head(self, head: bytes, exchange: _Exchange) -> tuple[Request, int | None]:
        """The request without its body, and the length of its body (None: chunked)."""
        self._protocol.receive_data(head)
        event = self._next_event()
        assert isinstance(event, h11.Request)  # the framing hands over whole heads
        exchange.reply.request_id = request_id_of(event.headers)
        exchange.method = event.method.decode("ascii")
        if exchange.method == "HEAD":
            exchange.reply.omit_body()
        length = body_length(head)
        request = build_request(event, exchange.reply.request_id)
        if length is None and event.http_version == b"1.0":
            raise InvalidRequest("HTTP/1.0 has no transfer codings")
        exchange.notes = request.notes
        return request, length

    async def _read_body(self, body: Body, refusal: ApiError | None) -> bytes:
        """The whole body. A refused one is read for nothing, which keeps the connection usable and takes no memory."""
        with self._reading(self._limits.body_timeout):
            for num_pieces in itertools.count(1):
                event = self._next_event()
                if isinstance(event, h11.EndOfMessage):
                    if refusal is not None:
                        raise refusal
                    return body.take_all()
                if not isinstance(event, h11.Data):
                    self._protocol.receive_data(await self._read_piece())
                elif refusal is None:
                    try:
                        body.add(event.data)
                    except NoCapacity as error:
                        refusal = error
                if num_pieces % CHUNKS_PER_TURN == 0:
                    await trio.lowlevel.checkpoint()
        raise self._overdue("body", self._limits.body_timeout)

    async def _read_piece(self) -> bytes:
        while (piece := self._framing.cut_body(self._peer.received)) is None:
            await self._peer.more()
        return piece

    def _next_event(self) -> object:
        try:
            return self._protocol.next_event()
        except h11.RemoteProtocolError as error:
            # What follows the colon in h11's messages are bytes of the client's.
            raise InvalidRequest(f"malformed request: {str(error).partition(':')[0]}") from None

    @contextlib.contextmanager
    def _reading(self, timeout: float) -> Iterator[None]:
        """Leaves the block when the time to read is over: after ``timeout``, or earlier when refused."""
        with trio.CancelScope(deadline=min(trio.current_time() + timeout, self._refused_at)) as scope:
            self._read_scope = scope
            try:
                yield
            finally:
                self._read_scope = None

    def _overdue(self, part: str, timeout: float) -> ApiError:
        return self._refusal or RequestTimeout(f"the {part} of a request must arrive within {timeout:g} s")

    # Answering it

    async def _call_handler(self, request: Request, exchange: _Exchange) -> ApiError | None:
        """Runs the handler for as long as the peer is there; returns what ended the answer, if anything did."""
        error: ApiError | None = None
        try:
            with self._peer.cancel_when_left() as scope:
                self._handler_scope = scope
                await self._service.handler(request, exchange.reply)
        except* ApiError as group:
            error = _first_api_error(group)
        finally:
            self._handler_scope = None
        if error is None and scope.cancelled_caught:
            error = self._refusal  # None when it was the peer that left
            exchange.is_abandoned = error is None
        elif error is None and not exchange.reply.is_started:
            raise RuntimeError("a handler returned without an answer")
        return error

    async def _conclude(self, exchange: _Exchange, error: ApiError | None) -> None:
        """Ends the answer as it has to end, and reports it."""
        reply, errors = exchange.reply, self._service.errors
        if error is not None:
            exchange.notes |= {"error": error.code or error.kind, "param": error.param}
        if self._peer.departure is None:
            if error is None:
                await reply.finish()
            elif not reply.is_started:
                await reply.send(errors.response(error))
            elif not reply.is_complete:
                await reply.fail(errors.event(error))
        elif error is not None:
            reply.is_lost = True
        self._exchange = None
        outcome = Outcome.FAILED if reply.has_failed else Outcome.COMPLETE
        if self._peer.departure is not None and (reply.is_lost or exchange.is_abandoned):
            outcome = self._peer.departure
        record = RequestRecord(
            server=self._service.name,
            request_id=reply.request_id,
            method=exchange.method,
            route=str(exchange.notes.get("route", "")),
            status=reply.status,
            duration=trio.current_time() - exchange.began,
            outcome=outcome,
            notes={name: note for name, note in exchange.notes.items() if name != "route" and note is not None},
        )
        if exchange.trace is not None:
            exchange.trace.end(record)
        self._service.on_finish(record)

    def _start_next_cycle(self) -> bool:
        is_reusable = self._protocol.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
        if not is_reusable or (self._refusal is not None and not self._peer.received):
            return False
        self._protocol.start_next_cycle()
        self._framing = self._new_framing()
        self.state = State.IDLE
        return True

    def _new_exchange(self) -> _Exchange:
        reply = HttpReply(self._protocol, self._peer, fresh_request_id())
        reply.is_last = self._refusal is not None
        return _Exchange(reply, Body(self._service.bodies), trio.current_time())

    def _new_framing(self) -> Framing:
        return Framing(max_head_bytes=self._limits.max_header_bytes, max_body_bytes=self._limits.max_body_bytes)


def build_request(event: h11.Request, request_id: str) -> Request:
    """A request without its body; raises InvalidRequest or VersionNotSupported."""
    if not event.http_version.startswith(b"1."):
        raise VersionNotSupported("this server speaks HTTP/1.1 and HTTP/1.0")
    headers = tuple((name.decode("ascii"), value.decode("iso-8859-1")) for name, value in event.headers)
    host = next((value for name, value in headers if name == "host"), None)
    if host is not None:
        check_host(host)
    elif event.http_version != b"1.0":
        raise InvalidRequest("a request of HTTP/1.1 must have a Host header")
    method = event.method.decode("ascii")
    target = parse_target(method, event.target.decode("ascii"))
    return Request(
        method=method,
        path=target.path,
        query=target.query,
        headers=headers,
        body=b"",
        request_id=request_id,
        raw_path=target.raw_path if target.raw_path != target.path else "",
    )


def _innermost(error: BaseException) -> Exception:
    """The exception inside groups of one, so that a log shows it and not its wrappings."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def _first_api_error(group: BaseExceptionGroup[ApiError]) -> ApiError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ApiError)
    return error

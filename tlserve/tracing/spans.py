"""A request as spans: one for the whole, named by HTTP's semantic conventions, and one for each phase below it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final

import trio
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from tlserve.http.access import Outcome, RequestRecord
from tlserve.http.messages import Header, Request
from tlserve.http.trace import Attribute
from tlserve.tracing.attributes import bounded
from tlserve.tracing.context import parent_context

PROVIDER: Final = "trio-tlserve"  # gen_ai.provider.name
UNFOLLOWED: Final = frozenset({"/healthz", "/health"})  # probes, which come every second and say nothing
MAX_PORT: Final = 65_535

_METHODS: Final = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# Notes of the log that have a name in the semantic conventions.
_NOTES: Final = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "error": "error.type",
}


class Tracer:
    """Begins the traces of one server's requests."""

    def __init__(self, tracer: trace.Tracer, *, scheme: str) -> None:
        self._tracer = tracer
        self._scheme = scheme

    def begin(self, request: Request, began: float) -> RequestTrace | None:
        """The trace of ``request``, which notes its id for the log; None for a probe of health."""
        if request.path in UNFOLLOWED:
            return None
        attributes = {"url.scheme": self._scheme} | _request_attributes(request)
        request_trace = RequestTrace(self._tracer, request, attributes, began)
        request.notes["trace_id"] = request_trace.trace_id
        return request_trace


class RequestTrace:
    """Implements http.trace.Trace on a span of OpenTelemetry, which may be one that is not sampled."""

    def __init__(
        self, tracer: trace.Tracer, request: Request, attributes: Mapping[str, Attribute], began: float
    ) -> None:
        self._tracer = tracer
        self._epoch = time.time() - trio.current_time()  # Unix seconds at which trio's clock was 0
        self._method = request.method if request.method in _METHODS else "HTTP"
        self._span = tracer.start_span(
            self._method,
            parent_context(request.headers),
            SpanKind.SERVER,
            bounded(attributes),
            start_time=self._nanoseconds(began),
        )
        self._context = trace.set_span_in_context(self._span)
        self._began = began

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    @property
    def headers(self) -> tuple[Header, ...]:
        """``traceresponse``, which says what ``traceparent`` says, in the other direction."""
        span = self._span.get_span_context()
        value = f"00-{self.trace_id}-{format_span_id(span.span_id)}-{span.trace_flags:02x}"
        return (("traceresponse", value),)

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(bounded(attributes))

    def add_phase(self, name: str, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, self._context, start_time=self._nanoseconds(began))
        span.end(self._nanoseconds(ended))

    def end(self, record: RequestRecord) -> None:
        if self._span.is_recording():
            self._span.update_name(f"{self._method} {record.route}".strip())
            self._span.set_attributes(bounded(_response_attributes(record)))
            if _is_our_fault(record):
                self._span.set_status(StatusCode.ERROR)
        self._span.end(self._nanoseconds(self._began + record.duration))

    def _nanoseconds(self, moment: float) -> int:
        """Unix time of a moment of trio's clock, which a step of the machine's own clock does not move."""
        return int((self._epoch + moment) * 1e9)


def _request_attributes(request: Request) -> dict[str, Attribute]:
    """What is known before the body is read: what a sampler can decide by."""
    is_known = request.method in _METHODS
    attributes: dict[str, Attribute] = {
        "http.request.method": request.method if is_known else "_OTHER",
        "url.path": request.raw_path or request.path,
    }
    if not is_known:
        attributes["http.request.method_original"] = request.method
    address, port = _split_host(request.header("host") or "")
    if address:
        attributes["server.address"] = address
    if port is not None:
        attributes["server.port"] = port
    return attributes


def _split_host(host: str) -> tuple[str, int | None]:
    """Name and port of a Host header that the connection has found well formed, which bounds neither."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):
        return host.strip("[]"), None
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) <= MAX_PORT
    return name.strip("[]"), int(port) if is_port else None


def _response_attributes(record: RequestRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "http.response.header.x-request-id": (record.request_id,),
        "tlserve.outcome": record.outcome.value,
    }
    if record.route:
        attributes["http.route"] = record.route
    if record.route in _OPERATIONS:
        attributes |= {"gen_ai.operation.name": _OPERATIONS[record.route], "gen_ai.provider.name": PROVIDER}
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    attributes |= {_NOTES[name]: note for name, note in record.notes.items() if name in _NOTES and note is not None}
    reasons = [reason for reason in str(record.notes.get("finish", "none")).split(",") if reason != "none"]
    if reasons and record.route != "/v1/embeddings":
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def _is_our_fault(record: RequestRecord) -> bool:
    """As the conventions have it for a server: what a client did wrong is no error of the span."""
    return record.outcome is Outcome.FAILED or (record.status or 0) >= 500

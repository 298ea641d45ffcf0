"""Collectors of traces on loopback: one that takes OTLP over HTTP, one over gRPC, and what they were sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collected:
    """What has come, decoded, and how the collector behaves."""

    status: int = 200
    endpoint: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: bytes = b""  # all that was sent, uncompressed
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    is_open: threading.Event = field(default_factory=threading.Event)  # nothing is answered before it is set
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # once a batch

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.raw += body
        for resource_spans in request.resource_spans:
            self.resources.append(attributes(resource_spans.resource))
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans
        self.arrived.release()
        self.is_open.wait()

    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def root(self) -> Span:
        (span,) = self.roots()
        return span

    def children(self, parent: Span) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a span or a resource as plain values."""
    pairs: list[KeyValue] = list(holder.attributes)
    assert len({pair.key for pair in pairs}) == len(pairs)
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting_http(*, status: int = 200, is_open: bool = True) -> Iterator[Collected]:
    """``status`` is what every batch is answered with; without ``is_open`` nothing is, until that is set."""
    collected = Collected(status)
    if is_open:
        collected.is_open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collected.paths.append(self.path)
            collected.headers.append({name.lower(): value for name, value in self.headers.items()})
            collected.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(collected.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    collected.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collected
    finally:
        collected.is_open.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def collecting_grpc() -> Iterator[Collected]:
    collected = Collected()
    collected.is_open.set()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            collected.take(request.SerializeToString())
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]  # generated code
        collected.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collected
        finally:
            server.stop(None).wait()

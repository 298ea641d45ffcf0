"""From finished spans to the collector, on a thread of OpenTelemetry's own that ends with the server.

Rule 1: requests never wait for the collector. Spans go into a queue of bounded length; those that find it full are
        dropped.
Rule 2: the log has at most two lines a REPORT_INTERVAL of what cannot be sent, and one at the end, whatever the
        libraries would say.
Rule 3: at the end the thread has FLUSH_TIMEOUT to send what is left, then nothing more is begun. It is waited for: a
        collector that has taken a connection and does not answer is given up by the exporter's own timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

import trio
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from tlserve.log import LOGGER
from tlserve.tracing.environment import endpoint, protocol

NAME: Final = "trio-tlserve"
FLUSH_TIMEOUT: Final = 3.0  # seconds
REPORT_INTERVAL: Final = 60.0  # seconds


class Export:
    """What makes spans, and sends them."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """Starts the thread. Raises what the SDK raises for variables that it cannot read."""
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._exporter = ReportingExporter(exporter, endpoint)
        self._processor = BatchSpanProcessor(self._exporter)  # the thread, when nothing can be refused any more
        provider.add_span_processor(self._processor)
        self.tracer: Tracer = provider.get_tracer("tlserve", version(NAME))

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Export:
        """With the exporter of the protocol in ``env``. Raises ValueError, ImportError or what the libraries raise."""
        return cls(_exporter(protocol(env)), endpoint(env))

    async def aclose(self) -> None:
        """Send what is left and end the thread.

        Cancellation handling: none before that; FLUSH_TIMEOUT and the exporter's own timeout are the deadlines.
        """
        ended = trio.Event()

        async def shut_down() -> None:
            await trio.to_thread.run_sync(self._processor.shutdown)
            ended.set()

        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shut_down)
                with trio.move_on_after(FLUSH_TIMEOUT):
                    await ended.wait()
                self._exporter.shutdown()
        self._exporter.report_rest()


class ReportingExporter(SpanExporter):
    """Sends through another exporter, and says in the log when that fails and when it works again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """``endpoint`` is what the log calls the collector."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_CAPTURE)
        self._exporter = exporter
        self._endpoint = endpoint
        self._num_lost = 0  # spans, since the last line of the log
        self._reported_at: float | None = None  # the last line that was no good news; None when all is well
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down:
            self._num_lost += len(spans)
            return SpanExportResult.FAILURE
        with _CAPTURE.lines() as lines:
            result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._report_success()
        else:
            self._report_loss(len(spans), lines[0] if lines else "")  # those of later attempts give no reason
        return result

    def shutdown(self) -> None:
        """Ends a pause between two attempts; idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def report_rest(self) -> None:
        """Say what was lost since the last line; nothing is sent any more."""
        if self._num_lost:
            self._say_lost("the server has ended")

    def _report_loss(self, num_spans: int, reason: str) -> None:
        self._num_lost += num_spans
        now = time.monotonic()
        if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL:
            self._say_lost(reason)
            self._reported_at = now

    def _say_lost(self, reason: str) -> None:
        fields = {"endpoint": self._endpoint, "reason": reason, "spans_lost": self._num_lost}
        LOGGER.warning("traces cannot be sent", extra=fields)
        self._num_lost = 0

    def _report_success(self) -> None:
        if self._reported_at is not None and time.monotonic() - self._reported_at >= REPORT_INTERVAL:
            LOGGER.info("traces are sent again", extra={"spans_lost": self._num_lost})
            self._reported_at, self._num_lost = None, 0


def _exporter(name: str) -> SpanExporter:
    """The exporter reads its own variables: endpoint, headers, certificates, compression, timeout."""
    if name == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def _resource() -> Resource:
    """Who sends: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, else this program."""
    given = OTELResourceDetector().detect().attributes
    return Resource.create({SERVICE_NAME: NAME, SERVICE_VERSION: version(NAME), **given})


class _Capture(logging.Filter):
    """Keeps the lines of one thread's exports from the log; those of other exporters in the process pass."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.local()

    @contextmanager
    def lines(self) -> Iterator[list[str]]:
        lines: list[str] = []
        self._thread.lines = lines
        try:
            yield lines
        finally:
            del self._thread.lines

    def filter(self, record: logging.LogRecord) -> bool:
        lines: list[str] | None = getattr(self._thread, "lines", None)
        if lines is None:
            return True
        lines.append(_reason(record))
        return False


def _reason(record: logging.LogRecord) -> str:
    """What the libraries say; of an exception only what is at its root, which they wrap three times."""
    for value in record.args if isinstance(record.args, tuple) else ():
        if isinstance(value, BaseException):
            return _root(value)
    return record.getMessage()


def _root(error: BaseException) -> str:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


_CAPTURE: Final = _Capture()
_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)

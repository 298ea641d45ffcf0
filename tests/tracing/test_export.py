"""A collector that is away, slow or broken: requests do not notice, the log stays short, the end has a deadline."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.client import connect, post
from tests.tracing.collector import collecting_grpc, collecting_http
from tlserve import ServeConfig, serve
from tlserve.tracing import export
from tlserve.tracing.export import REPORT_INTERVAL, ReportingExporter

SUCC = ServeConfig.for_model(Path(__file__).parents[2] / "fixtures" / "succ")
CHAT = "/v1/chat/completions"
BODY = {"model": "succ", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class FakeExporter(SpanExporter):
    """Succeeds or fails as told, with a line of its own as the libraries have."""

    def __init__(self) -> None:
        self.is_up = True
        self.num_shutdowns = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.is_up:
            return SpanExportResult.SUCCESS
        logging.getLogger(EXPORTER_LOGGER).error("Failed: %s", "connection refused")
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(export, "time", clock)
    return clock


def threads() -> set[str]:
    """trio keeps threads that have nothing to do for some seconds, under this name."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread")}


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    """What the log has of traces, and the number of spans that each line says are lost."""
    caplog_records = [record for record in caplog.records if "traces" in record.getMessage()]
    return [(record.getMessage(), vars(record).get("spans_lost")) for record in caplog_records]


def test_a_collector_that_is_away_is_told_once_and_again_when_it_is_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spans: list[Any] = [object()]
    fake = FakeExporter()
    exporter = ReportingExporter(fake, "http://collector")
    exporter.export(spans)
    fake.is_up = False
    for _ in range(10):
        assert exporter.export(spans * 2) is SpanExportResult.FAILURE
    assert lines(caplog) == [("traces cannot be sent", 2)]
    assert vars(caplog.records[-1])["reason"] == "Failed: connection refused"
    clock.now += REPORT_INTERVAL
    exporter.export(spans)
    assert lines(caplog)[1:] == [("traces cannot be sent", 19)]
    fake.is_up = True
    exporter.export(spans)
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 2
    clock.now += REPORT_INTERVAL
    for _ in range(3):
        exporter.export(spans)
    assert lines(caplog)[2:] == [("traces are sent again", 0)]


def test_the_log_of_other_exporters_in_the_process_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeExporter()
    fake.is_up = False
    ReportingExporter(fake, "http://collector").export([])
    fake.export([])
    assert [record.name for record in caplog.records] == ["tlserve", EXPORTER_LOGGER]


def test_an_exporter_is_shut_down_once_and_then_sends_nothing() -> None:
    fake = FakeExporter()
    exporter = ReportingExporter(fake, "http://collector")
    exporter.shutdown()
    exporter.shutdown()
    assert fake.num_shutdowns == 1
    assert exporter.export([]) is SpanExportResult.FAILURE


def test_what_was_lost_without_a_line_gets_one_at_the_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    spans: list[Any] = [object()]
    fake = FakeExporter()
    exporter = ReportingExporter(fake, "http://collector")
    exporter.report_rest()
    assert lines(caplog) == []
    fake.is_up = False
    exporter.export(spans)
    exporter.export(spans * 2)
    exporter.shutdown()
    exporter.export(spans * 3)
    exporter.report_rest()
    assert lines(caplog) == [("traces cannot be sent", 1), ("traces cannot be sent", 5)]


def test_of_an_exception_the_log_has_what_is_at_its_root(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapping(FakeExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                try:
                    raise ConnectionRefusedError(111, "Connection refused")
                except OSError as error:
                    raise ValueError("<Pool object at 0x7f>: Max retries exceeded") from error
            except ValueError as error:
                logging.getLogger(EXPORTER_LOGGER).warning("Transient error %s", error)
            return SpanExportResult.FAILURE

    ReportingExporter(Wrapping(), "http://collector:4318").export([])
    fields = vars(caplog.records[-1])
    assert (fields["endpoint"], fields["reason"]) == ("http://collector:4318", "Connection refused")


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_collector_that_is_not_there_costs_a_line_of_the_log(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "FLUSH_TIMEOUT", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    before = threads()
    with socket.socket() as unused:  # bound and not listening: every connection is refused
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        async with serve(SUCC) as server, connect(server.http_addr) as client:
            for _ in range(3):
                assert (await client.request("POST", CHAT, BODY)).status == 200
    assert threads() == before
    assert sum(lost for _, lost in lines(caplog)) == 12
    assert len(lines(caplog)) <= 2
    first = next(record for record in caplog.records if "traces" in record.getMessage())
    assert "refused" in vars(first)["reason"].lower()
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_collector_that_refuses_costs_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting_http(status=400) as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        async with serve(SUCC) as server:
            await post(server.http_addr, CHAT, BODY)
    assert lines(caplog) == [("traces cannot be sent", 4)]
    assert "400" in vars(caplog.records[-1])["reason"]


async def test_requests_do_not_wait_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit into the queue is dropped, and the log is not filled with it."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with collecting_http(is_open=False) as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        async with serve(SUCC) as server, connect(server.http_addr) as client:
            await client.request("POST", CHAT, BODY)
            await trio.to_thread.run_sync(collected.arrived.acquire)
            for _ in range(20):  # with the first batch on its way all the time
                assert (await client.request("POST", CHAT, BODY)).status == 200
            assert not collected.is_open.is_set()
            collected.is_open.set()
    assert 4 < len(collected.spans) <= 4 + 8
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) <= 4


@pytest.mark.parametrize("ending", ["left", "cancelled"])
async def test_a_collector_that_does_not_answer_is_given_up_at_the_end(
    ending: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch on its way by the exporter's timeout, those behind it by ours; and no thread is left."""
    monkeypatch.setattr(export, "FLUSH_TIMEOUT", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with collecting_http(is_open=False) as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        before = threads()
        with trio.CancelScope() as scope:
            async with serve(SUCC) as server:
                for _ in range(3):
                    await post(server.http_addr, CHAT, BODY)
                if ending == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
        left = {name for name in threads() - before if "process_request_thread" not in name}  # the collector's own
        assert left == set()
        assert len(collected.spans) < 12  # the last batch was not begun
    first, rest = lines(caplog)
    assert (first, rest) == (("traces cannot be sent", 4), ("traces cannot be sent", 8))


async def test_a_slow_collector_over_grpc_is_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FLUSH_TIMEOUT", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with collecting_grpc() as collected:
        collected.is_open.clear()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        before = threads()
        async with serve(SUCC) as server:
            await post(server.http_addr, CHAT, BODY)
        assert {name for name in threads() - before if not name.startswith("ThreadPoolExecutor")} == set()
        collected.is_open.set()

"""When the environment asks for traces, and what it may get wrong."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.client import post
from tests.tracing.collector import collecting_http
from tlserve import ServeConfig, serve
from tlserve.tracing.environment import endpoint, endpoint_variable, is_wanted, protocol

SUCC = Path(__file__).parents[2] / "fixtures" / "succ"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
OF_TRACES = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}
CHAT = {"model": "succ", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("https://user:secret@collector", "https://collector"),
        ("https://collector/x?token=secret", "https://collector/x"),
        ("user:secret@collector:4317", "collector:4317"),
        ("http://collector/a@b", "http://collector/a@b"),
    ],
)
def test_the_endpoint_is_shown_without_what_is_secret(url: str, shown: str) -> None:
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": url}) == shown


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        (OF_TRACES, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
def test_traces_are_wanted_where_a_collector_is_named(env: dict[str, str], wanted: bool) -> None:
    assert is_wanted(env) is wanted


def test_the_variable_of_traces_goes_before_that_of_all_signals() -> None:
    assert endpoint_variable(ENDPOINT | OF_TRACES) == "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    assert protocol({}) == "http/protobuf"
    assert protocol({"OTEL_EXPORTER_OTLP_PROTOCOL": "GRPC "}) == "grpc"
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert protocol(both) == "http/protobuf"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL = 'http/json': must be"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "max_queue_size must be a positive integer"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer"),
    ],
)
async def test_a_wrong_variable_is_a_line_of_the_log_and_the_server_serves(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting_http() as collected:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
        monkeypatch.setenv(name, value)
        before = {thread.name for thread in threading.enumerate()}
        async with serve(ServeConfig.for_model(SUCC)) as server:
            assert "OtelBatch" not in str({thread.name for thread in threading.enumerate()} - before)
            reply = await post(server.http_addr, "/v1/chat/completions", CHAT)
    assert (reply.status, "traceresponse" in reply.headers) == (200, False)
    assert collected.spans == []
    (record,) = [record for record in caplog.records if record.name == "tlserve" and record.levelname == "WARNING"]
    assert record.getMessage() == "no traces are sent"
    assert vars(record)["reason"].startswith(reason)


async def test_without_the_libraries_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "tlserve.tracing.export", None)
    async with serve(ServeConfig.for_model(SUCC)) as server:
        assert (await post(server.http_addr, "/v1/chat/completions", CHAT)).status == 200
    (record,) = [record for record in caplog.records if "no traces" in record.getMessage()]
    assert "pip install '.[otel]'" in record.getMessage()
    assert vars(record)["variable"] == "OTEL_EXPORTER_OTLP_ENDPOINT"

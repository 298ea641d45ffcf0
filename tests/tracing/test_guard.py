"""What is between a request and its trace: no fault of a trace is one of the request's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.client import get
from tests.tracing.test_traces import SUCC
from tlserve import ServeConfig, serve
from tlserve.http.access import Outcome, RequestRecord
from tlserve.http.messages import Header, Request
from tlserve.http.trace import Attribute, Trace
from tlserve.tracing import spans
from tlserve.tracing.attributes import MAX_ITEMS, MAX_TEXT, bounded
from tlserve.tracing.guard import MAX_REASON, Guard

REQUEST = Request(method="GET", path="/", query="", headers=(), body=b"", request_id="id")
RECORD = RequestRecord("api", "id", "GET", "/", 200, 0.1, Outcome.COMPLETE, {})


class BrokenTrace:
    """Implements Trace by raising."""

    @property
    def headers(self) -> tuple[Header, ...]:
        raise ValueError("headers")

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        raise ValueError("describe")

    def add_phase(self, name: str, began: float, ended: float) -> None:
        raise ValueError("phase")

    def end(self, record: RequestRecord) -> None:
        raise ValueError("end")


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["reason"] for record in caplog.records if record.getMessage() == "a trace is incomplete"]


def test_a_trace_that_cannot_begin_is_none_and_one_bounded_line(caplog: pytest.LogCaptureFixture) -> None:
    def begin(request: Request, began: float) -> Trace | None:
        raise ValueError("x" * 5000)

    guard = Guard(begin)
    assert [guard.begin(REQUEST, 0.0), guard.begin(REQUEST, 0.0)] == [None, None]
    (reason,) = reasons(caplog)
    assert reason.startswith("ValueError: xxx")
    assert len(reason) == MAX_REASON


def test_a_trace_that_breaks_says_nothing_to_its_request(caplog: pytest.LogCaptureFixture) -> None:
    trace = Guard(lambda request, began: BrokenTrace()).begin(REQUEST, 0.0)
    assert trace is not None
    assert trace.headers == ()
    trace.describe({})
    trace.add_phase("queue", 0.0, 1.0)
    trace.end(RECORD)
    assert reasons(caplog) == ["ValueError: headers"]


def test_a_request_that_is_not_followed_stays_so() -> None:
    assert Guard(lambda request, began: None).begin(REQUEST, 0.0) is None


async def test_a_server_whose_tracing_is_broken_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Request) -> dict[str, Attribute]:
        raise RuntimeError("broken")

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(spans, "_request_attributes", broken)
    async with serve(ServeConfig.for_model(SUCC)) as server:
        for _ in range(2):
            assert (await get(server.http_addr, "/v1/models")).status == 200
    assert reasons(caplog) == ["RuntimeError: broken"]


def test_attributes_are_bounded_and_typed() -> None:
    many: dict[str, Attribute] = {
        "text": "a" * 300,
        "lone": "\ud800",
        "big": 2**63,
        "small": -(10**900),
        "yes": True,
        "half": 0.5,
    }
    assert bounded({**many, "list": ("b" * 300,) * 200}) == {
        "text": "a" * MAX_TEXT,
        "lone": "?",
        "big": 2**63 - 1,
        "small": -(2**63),
        "yes": True,
        "half": 0.5,
        "list": ("b" * MAX_TEXT,) * MAX_ITEMS,
    }

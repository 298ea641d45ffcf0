"""What the handlers tell a trace: the phases of a request, and its parameters without any text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.openai.fakes import QUEUE_TIME, Api, Pause, RecordedReply
from tlserve.errors import ApiError, NoCapacity, Overloaded
from tlserve.http.access import RequestRecord
from tlserve.http.messages import Header, Request
from tlserve.http.trace import Attribute
from tlserve.openai.completions import completions
from tlserve.openai.embeddings import embeddings
from tlserve.openai.traces import Timeline


class RecordedTrace:
    """Keeps what it is told, with times from when it was made."""

    def __init__(self) -> None:
        self.headers: tuple[Header, ...] = ()
        self.attributes: dict[str, Attribute] = {}
        self.phases: dict[str, tuple[float, float]] = {}
        self._began = trio.current_time()

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        self.attributes |= attributes

    def add_phase(self, name: str, began: float, ended: float) -> None:
        assert name not in self.phases
        self.phases[name] = (began - self._began, ended - self._began)

    def end(self, record: RequestRecord) -> None:
        raise AssertionError("a trace is ended by the connection")


class SlowReply(RecordedReply):
    """Each write takes ten seconds."""

    async def write(self, data: bytes) -> None:
        await trio.sleep(10)
        await super().write(data)


def request_with(trace: RecordedTrace, path: str, body: dict[str, Any]) -> Request:
    return Request("POST", path, "", (), json.dumps({"model": "succ"} | body).encode(), "test", trace=trace)


def complete(trace: RecordedTrace, **fields: Any) -> Request:
    return request_with(trace, "/v1/completions", {"prompt": "a"} | fields)


@pytest.mark.parametrize(("reply_type", "end"), [(RecordedReply, 5), (SlowReply, 25)])
async def test_the_last_phase_ends_with_the_last_token_and_not_with_its_way_to_the_client(
    autojump_clock: MockClock, reply_type: type[RecordedReply], end: int
) -> None:
    """With two of three writes before it, of ten seconds each where the client is slow."""
    api = Api(lambda request: [Pause(2), 98, Pause(3), 99, 100])
    trace = RecordedTrace()
    await completions(api.service, complete(trace, max_tokens=3, stream=True), reply_type())
    assert trace.phases.keys() == {"queue", "prefill", "decode"}
    assert trace.phases["queue"] == pytest.approx((0, QUEUE_TIME))
    assert trace.phases["prefill"] == pytest.approx((QUEUE_TIME, 2))
    assert trace.phases["decode"] == pytest.approx((2, end))


async def test_a_client_that_leaves_ends_the_phase_it_was_in(autojump_clock: MockClock) -> None:
    api = Api(lambda request: [Pause(1), 98, Pause(100), 99])
    trace = RecordedTrace()
    with trio.move_on_after(7):
        await completions(api.service, complete(trace, max_tokens=2), RecordedReply())
    assert trace.phases["decode"] == pytest.approx((1, 7))


@pytest.mark.parametrize(
    ("timeline", "phases"),
    [
        (Timeline(5.0, None, None, 2.0), {"queue": (5, 7)}),
        (Timeline(5.0, 0.5, None, 2.0), {"queue": (5, 5.5), "prefill": (5.5, 7)}),
        (Timeline(5.0, 0.5, 1.0, 2.0), {"queue": (5, 5.5), "prefill": (5.5, 6), "decode": (6, 7)}),
    ],
)
async def test_a_phase_that_was_not_reached_is_not_there(
    autojump_clock: MockClock, timeline: Timeline, phases: dict[str, tuple[float, float]]
) -> None:
    trace = RecordedTrace()  # made at 0 on this clock
    timeline.add_to(trace)
    assert trace.phases == phases


@pytest.mark.parametrize("error", [Overloaded("full"), NoCapacity("late")])
async def test_what_was_refused_at_the_door_has_no_phases(autojump_clock: MockClock, error: ApiError) -> None:
    api = Api()
    for handler, body in ((completions, {"prompt": "a"}), (embeddings, {"input": "a"})):
        api.loop.refusals = [error]
        trace = RecordedTrace()
        with pytest.raises(type(error)):
            await handler(api.service, request_with(trace, "/", body), RecordedReply())
        assert trace.phases == {}
        assert trace.attributes["gen_ai.request.model"] == "succ"


async def test_parameters_are_those_that_were_asked_for(autojump_clock: MockClock) -> None:
    trace = RecordedTrace()
    reply = RecordedReply()
    await completions(Api().service, complete(trace, stop=["secret"], max_tokens=2, temperature=0), reply)
    assert trace.attributes == {
        "gen_ai.request.model": "succ",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": reply.json["id"],
        "gen_ai.response.model": "succ",
    }

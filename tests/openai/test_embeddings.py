"""/v1/embeddings: forms, encodings, and how many inputs are in the engine at once."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from trio.testing import MockClock

from tests.openai.fakes import QUEUE_TIME, Api, RecordedReply
from tlserve.engine.request import GenRequest
from tlserve.errors import NoCapacity, Overloaded


async def test_embeddings_come_as_floats_or_base64() -> None:
    def vectors(reply: RecordedReply) -> list[Any]:
        data = reply.json["data"]
        assert [(item["object"], item["index"]) for item in data] == [("embedding", i) for i in range(len(data))]
        return [item["embedding"] for item in data]

    body = {"model": "succ", "input": ["a", [1, 2], "ccc"]}
    reply = await Api().call("/v1/embeddings", body)
    assert {key: value for key, value in reply.json.items() if key != "data"} == {
        "object": "list",
        "model": "succ",
        "usage": {
            "prompt_tokens": 6,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        },
    }
    encoded = vectors(await Api().call("/v1/embeddings", {**body, "encoding_format": "base64"}))
    for numbers, text in zip(vectors(reply), encoded, strict=True):
        raw = base64.b64decode(text)
        assert len(raw) == 4 * 4
        assert np.array_equal(np.frombuffer(raw, "<f4"), np.array(numbers, np.float32))


async def test_embedding_requests_are_pooling_requests() -> None:
    api = Api()
    await api.call("/v1/embeddings", {"model": "succ", "input": "ab"}, headers={"x-tl-priority": "3"})
    assert api.loop.requests == [GenRequest(tuple(b"ab"), 0, priority=3, is_pooling=True)]


async def test_the_log_gets_tokens_and_the_end_of_embeddings() -> None:
    api = Api()
    await api.call("/v1/embeddings", {"model": "succ", "input": ["a", "bc"]})
    expected = {"queue_seconds": QUEUE_TIME, "prompt_tokens": 3, "cached_tokens": 0, "finish": "stop"}
    assert api.request.notes == {"route": "/v1/embeddings"} | expected
    api.loop.refusals = [NoCapacity("no room")]
    await api.call("/v1/embeddings", {"model": "succ", "input": ["a", "bc"]})
    assert (api.request.notes["prompt_tokens"], api.request.notes["finish"]) == (3, "none")


async def test_an_embedding_input_may_fill_the_context_and_no_more() -> None:
    assert (await Api().call("/v1/embeddings", {"model": "succ", "input": "a" * 64})).status == 200
    reply = await Api().call("/v1/embeddings", {"model": "succ", "input": ["a", "a" * 65]})
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert reply.json["error"]["param"] == "input[1]"
    reply = await Api().call("/v1/embeddings", {"model": "succ", "input": [256]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")


async def test_other_dimensions_than_the_models_are_422() -> None:
    for dimensions, status in ((4, 200), (None, 200), (5, 422), (10**30, 422)):
        reply = await Api().call("/v1/embeddings", {"model": "succ", "input": "a", "dimensions": dimensions})
        assert reply.status == status
        if status == 422:
            assert reply.json["error"]["param"] == "dimensions"
            assert reply.json["error"]["message"].startswith("dimensions must be 4, which is what this model has, got ")


async def test_many_embedding_inputs_take_a_quarter_of_the_queue_at_most() -> None:
    for capacity, size in ((64, 16), (1000, 16), (20, 5), (1, 1)):
        api = Api(queue_capacity=capacity)
        reply = await api.call("/v1/embeddings", {"model": "succ", "input": ["a"] * 40})
        assert len(reply.json["data"]) == 40
        assert max(api.loop.groups) == size
        assert sum(api.loop.groups) == 40


async def test_later_embedding_groups_wait_for_room(autojump_clock: MockClock) -> None:
    api = Api(queue_capacity=8)
    api.loop.refusals = [Overloaded("full")]
    reply = await api.call("/v1/embeddings", {"model": "succ", "input": ["a"] * 5})
    assert reply.status == 429  # the first group is admitted like any request

    first = api.loop.submit

    def full_after_the_first(requests: Any) -> Any:
        if len(api.loop.groups) == 1 and not full:
            full.append(True)
            api.loop.refusals = [Overloaded("full")] * 3
        return first(requests)

    full: list[bool] = []
    api.loop.submit = full_after_the_first  # type: ignore[method-assign]
    reply = await api.call("/v1/embeddings", {"model": "succ", "input": ["a"] * 5})
    assert reply.status == 200
    assert len(reply.json["data"]) == 5
    assert not api.loop.refusals

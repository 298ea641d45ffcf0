"""Whole and streamed answers of both endpoints, over a scripted engine."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.openai.fakes import EOS, QUEUE_TIME, Api, Pause, RecordedReply, _Generation, fixed
from tlserve.errors import InternalFault, InvalidRequest, NoCapacity, Overloaded
from tlserve.http import sse
from tlserve.http.messages import Request
from tlserve.openai.completions import completions
from tlserve.openai.stream import PING_INTERVAL

ENDPOINTS = ["chat", "complete"]


async def ask(api: Api, endpoint: str, **fields: object) -> RecordedReply:
    return await (api.chat("a", **fields) if endpoint == "chat" else api.complete("a", **fields))


def text_of(choice: Any) -> str:
    """The text that a choice of any document carries."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice["message" if "message" in choice else "delta"]["content"])


def joined(events: list[Any], index: int = 0) -> str:
    chunks = [event for event in events if isinstance(event, dict)]
    return "".join(text_of(c) for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_chat_answers_with_every_field_of_the_reference() -> None:
    document = (await Api().chat("a", max_tokens=3, temperature=0)).json
    assert document.pop("id").startswith("chatcmpl-")
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "chat.completion",
        "model": "succ",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "bcd", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 3,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "service_tier": "default",
        "system_fingerprint": "fp_test",
    }


async def test_completions_answer_with_every_field_of_the_reference() -> None:
    document = (await Api().complete("a", max_tokens=3)).json
    assert document.pop("id").startswith("cmpl-")
    assert document["object"] == "text_completion"
    assert document["system_fingerprint"] == "fp_test"
    assert document["choices"] == [{"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "length"}]
    assert document["usage"]["total_tokens"] == 4


async def test_a_chat_stream_is_role_text_finish_usage_done() -> None:
    reply = await Api().chat("a", max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert (reply.status, reply.headers) == (200, sse.SSE_HEADERS)
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (1, 3)
    head = {
        "object": "chat.completion.chunk",
        "model": "succ",
        "service_tier": "default",
        "system_fingerprint": "fp_test",
        "usage": None,
    }
    deltas = [({"role": "assistant", "content": ""}, None), ({"content": "b"}, None), ({"content": "c"}, None)]
    assert chunks == [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        for delta, reason in [*deltas, ({"content": "d"}, "length")]
    ]


async def test_a_completion_stream_has_the_reference_s_shape() -> None:
    *chunks, done = (await Api().complete("a", max_tokens=2, stream=True)).events
    assert done == "[DONE]"
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "c", "logprobs": None, "finish_reason": "length"}],
    ]


SCRIPTS: dict[str, tuple[Any, dict[str, object]]] = {
    "length": (fixed(b"hello"), {"max_tokens": 3}),
    "eos": (fixed(b"hello", EOS), {}),
    "eos at once": (fixed(EOS), {}),
    "stop string": (fixed(b"hello world"), {"stop": "o w"}),
    "stop string at once": (fixed(b"hello"), {"stop": ["h"]}),
    "stop string by the last token": (fixed(b"hello"), {"stop": ["llo"], "max_tokens": 5}),
    "held back, then eos": (fixed(b"sky?", EOS), {"stop": ["?!"]}),
    "stop id": (fixed(b"hello"), {"stop_token_ids": [ord("l")]}),
    "half a character": (fixed("a😀".encode()[:3], EOS), {}),
    "invalid bytes": (fixed(b"\xfe\xc0a\x80", EOS), {}),
    "characters in pieces": (fixed("a😀ď漢👨‍👩‍👧é".encode(), EOS), {"max_tokens": 50}),
    "line ends of all kinds": (fixed("a\n\r\x85\u2028\u2029\0b".encode(), EOS), {}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize(("script", "fields"), SCRIPTS.values(), ids=SCRIPTS)
async def test_joined_deltas_equal_the_whole_text(
    endpoint: str, with_logprobs: bool, script: Any, fields: dict[str, object]
) -> None:
    if with_logprobs:
        fields = {**fields, **({"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2})}
    whole = (await ask(Api(script), endpoint, **fields)).json
    reply = await ask(Api(script), endpoint, stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert joined(chunks) == text_of(whole["choices"][0])
    assert usage["usage"] == whole["usage"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    assert merged_logprobs(chunks) == whole["choices"][0]["logprobs"]
    for forbidden in ("\x85", "\u2028", "\u2029"):
        assert forbidden not in reply.body.decode()


def merged_logprobs(chunks: list[Any]) -> Any:
    """The logprobs of all chunks in the shape of a whole answer."""
    merged: dict[str, Any] | None = None
    for chunk in chunks:
        part = chunk["choices"][0]["logprobs"]
        if part is not None:
            merged = part if merged is None else {k: v and merged[k] + v for k, v in part.items()}
    return merged


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_one_token_a_chunk_and_none_without_text(endpoint: str) -> None:
    reply = await ask(Api(fixed("é!".encode(), EOS)), endpoint, stream=True)
    texts = [text_of(event["choices"][0]) for event in reply.events[:-1]]
    assert texts == [""] * (endpoint == "chat") + ["é", "!", ""]


async def test_prompts_of_a_list_are_choices_in_their_order() -> None:
    api = Api()
    document = (await api.complete(["a", [98], "xc"], max_tokens=2)).json
    assert [(c["index"], c["text"]) for c in document["choices"]] == [(0, "bc"), (1, "cd"), (2, "de")]
    assert document["usage"]["prompt_tokens"] == 4
    assert document["usage"]["completion_tokens"] == 6
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert api.loop.groups == [3]  # admitted together or not at all


async def test_a_list_stream_merges_choices_by_index() -> None:
    fields: dict[str, object] = {"max_tokens": 4, "stop": ["de"]}
    whole = (await Api().complete(["a", "c", "x"], **fields)).json
    api = Api()
    reply = await api.complete(["a", "c", "x"], stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(map(text_of, mine)) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
    assert [c["text"] for c in whole["choices"]] == ["bc", "", "yz{|"]
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["completion_tokens"] == 4 + 2 + 4  # none are counted after a choice has ended


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_stop_string_leaves_the_engine_before_the_client_has_read(endpoint: str, stream: bool) -> None:
    api = Api(fixed(b"bcdefgh"))
    inside: list[int] = []
    reply = RecordedReply(on_write=lambda data: inside.append(api.loop.num_inside))
    body: dict[str, object] = {"model": "succ", "stop": "de", "stream": stream}
    body |= {"messages": [{"role": "user", "content": "a"}]} if endpoint == "chat" else {"prompt": "a"}
    await api.call("/v1/chat/completions" if endpoint == "chat" else "/v1/completions", body, reply=reply)
    assert api.loop.num_tokens == 4
    assert api.loop.num_inside == 0
    assert inside == ([1, 1, 0] if stream else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_cancelled_handler_leaves_the_engine(endpoint: str, stream: bool) -> None:
    api = Api(fixed(b"b", Pause(math.inf)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(ask, api, endpoint, stream=stream))
        await api.loop.paused.wait()
        assert api.loop.num_inside == 1
        nursery.cancel_scope.cancel()
    assert api.loop.num_inside == 0
    assert api.request.notes["completion_tokens"] == 1
    assert api.request.notes["finish"] == "none"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_refusals_of_the_engine_are_plain_responses(endpoint: str, stream: bool) -> None:
    api = Api()
    api.loop.refusals = [Overloaded("64 requests are waiting")]
    reply = await ask(api, endpoint, stream=stream)
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert ("Retry-After", "1") in reply.headers
    reply = await ask(Api(fixed(NoCapacity("waited too long"))), endpoint, stream=stream)
    assert (reply.status, reply.json["error"]["code"]) == (503, "no_capacity")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_a_full_server_refuses_before_it_looks_into_the_body(path: str) -> None:
    """What costs time, decoding and templates and tokenizers, is not begun: not even this body is a 400."""
    api = Api()
    api.loop.is_full = True
    reply = await api.call(path, b"{ no json")
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert ("Retry-After", "1") in reply.headers
    api.loop.is_full = False
    assert (await api.call(path, b"{ no json")).status == 400
    assert api.loop.num_held == 0


@pytest.mark.parametrize("endpoint", [*ENDPOINTS, "embed"])
async def test_a_place_is_held_from_the_body_to_the_submission(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    held: list[int] = []
    tokenizer = api.service.tokenizer
    encode, submit = type(tokenizer).encode, api.loop.submit

    def watched_encode(*args: Any, **options: Any) -> list[int]:
        held.append(api.loop.num_held)
        return encode(*args, **options)

    def watched_submit(requests: Any) -> Any:
        held.append(api.loop.num_held)
        return submit(requests)

    monkeypatch.setattr(type(tokenizer), "encode", watched_encode)
    monkeypatch.setattr(api.loop, "submit", watched_submit)
    if endpoint == "embed":
        reply = await api.call("/v1/embeddings", {"model": "succ", "input": "a"})
    else:
        reply = await ask(api, endpoint, max_tokens=1)
    assert reply.status == 200
    assert held == [1, 0]


async def test_a_fault_in_a_stream_is_its_last_event() -> None:
    reply = await Api(fixed(b"bc", InternalFault("something broke"))).chat("a", stream=True)
    *chunks, error = reply.events
    assert reply.status == 200
    assert joined(chunks) == "bc"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error == {
        "error": {"message": "something broke", "type": "server_error", "param": None, "code": "internal_error"}
    }


async def test_a_silent_stream_gets_pings(autojump_clock: MockClock) -> None:
    """Fifteen seconds from the last event, not from the last token: a token without text is no event."""
    api = Api(fixed(b"b", Pause(40), b"c", Pause(10), b"x", Pause(10), b"y", EOS))
    reply = await api.complete("a", stream=True, stop=["xyz"])
    events = [event if isinstance(event, str) else text_of(event["choices"][0]) for event in reply.events]
    assert events == ["b", ": ping", ": ping", "c", ": ping", "xy", "[DONE]"]


async def test_what_comes_at_the_moment_of_a_ping_is_not_lost(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is there, and before the stream looks at it the time for a ping has passed."""
    take = _Generation.__anext__

    async def late(outputs: _Generation) -> Any:
        output = await take(outputs)
        autojump_clock.jump(PING_INTERVAL + 1)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return output

    monkeypatch.setattr(_Generation, "__anext__", late)
    reply = await Api(fixed(*b"bcdef", EOS)).complete("a", stream=True, max_tokens=6)
    assert joined(reply.events) == "bcdef"
    assert reply.events[-1] == "[DONE]"


async def test_a_stream_starts_with_its_first_token_or_after_15_seconds(autojump_clock: MockClock) -> None:
    started: list[float] = []
    begun = trio.current_time()
    reply = RecordedReply(on_write=lambda data: started.append(trio.current_time() - begun))
    api = Api(fixed(Pause(20), b"b", EOS))
    body = {"model": "succ", "messages": [{"role": "user", "content": "a"}], "stream": True}
    await api.call("/v1/chat/completions", body, reply=reply)
    assert started == [15, 20, 20]
    assert reply.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reply = await Api(fixed(Pause(14), NoCapacity("waited too long"))).chat("a", stream=True)
    assert reply.status == 503


async def test_a_chunk_is_written_as_soon_as_its_token_is_there() -> None:
    reply = await Api().chat("a", max_tokens=4, stream=True)
    assert [write.count(b"data: ") for write in reply.writes] == [
        2,
        1,
        1,
        2,
    ]  # role with the first, [DONE] with the last


async def test_chat_logprobs_have_token_bytes_and_alternatives() -> None:
    document = (await Api(fixed("é".encode(), EOS)).chat("a", logprobs=True, top_logprobs=2)).json
    logprobs = document["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": "�",
        "logprob": -0.25,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.0, "bytes": [98]},
        ],
    }
    assert [entry["bytes"] for entry in logprobs["content"]] == [[0xC3], [0xA9], []]
    assert document["usage"]["completion_tokens"] == 3


async def test_completion_logprobs_are_parallel_lists() -> None:
    document = (await Api(fixed(b"ab", EOS)).complete("a", logprobs=1)).json
    assert document["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "<eos>"],
        "token_logprobs": [-0.25, -0.25, -0.25],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5, "b": -0.25}, {"a": -0.5, "<eos>": -0.25}],
        "text_offset": [0, 1, 2],
    }


async def test_offsets_of_broken_characters_are_the_same_streamed() -> None:
    fields = {"prompt": [239], "max_tokens": 4, "temperature": 0, "logprobs": 0}
    choice = (await Api().complete(**fields)).json["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("\ufffd" * 4, [0, 1, 2, 3])
    chunks = (await Api().complete(**fields, stream=True)).events[:-1]
    assert merged_logprobs(chunks) == choice["logprobs"]


async def test_a_priority_is_given_once() -> None:
    api = Api()
    request = Request("POST", "", "", (("x-tl-priority", "1"), ("x-tl-priority", "1")), b"", "test")
    with pytest.raises(InvalidRequest, match="must be given once, got 2") as caught:
        await completions(api.service, request, RecordedReply())
    assert caught.value.param == "X-TL-Priority"
    assert api.loop.requests == []


async def test_priority_reaches_the_engine() -> None:
    api = Api()
    for value, priority in (("-100", -100), ("7", 7), ("+7", 7)):
        await api.call("/v1/completions", {"model": "succ", "prompt": "a"}, headers={"x-tl-priority": value})
        assert api.loop.requests[-1].priority == priority
    for value in ("101", "-101", "1.0", "", "high", "1_0", "٣", "\xa05", "5\x85", "5\x1c", "9" * 5000):
        reply = await api.call("/v1/completions", {"model": "succ", "prompt": "a"}, headers={"x-tl-priority": value})
        assert (reply.status, reply.json["error"]["param"]) == (400, "X-TL-Priority"), value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_a_kv_handle_is_not_found(path: str) -> None:
    reply = await Api().call(path, {}, headers={"x-tl-kv-handle": "x" * 1000})
    assert (reply.status, reply.json["error"]["code"]) == (404, "kv_handle_not_found")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/tokenize", {"text": "a"}),
        ("/v1/detokenize", {"tokens": [1]}),
    ],
)
async def test_an_unknown_model_is_404(path: str, fields: dict[str, object]) -> None:
    reply = await Api().call(path, {"model": "gpt-4", **fields})
    assert reply.status == 404
    assert reply.json["error"] == {
        "message": 'the model "gpt-4" does not exist, this server has succ',
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_the_log_gets_tokens_times_and_reasons(autojump_clock: MockClock) -> None:
    api = Api(lambda request: [Pause(2), *range(request.prompt[-1] + 1, 256)])
    await api.complete(["a", "c"], max_tokens=4, stop="de")
    assert api.request.notes == {
        "route": "/v1/completions",
        "queue_seconds": QUEUE_TIME,
        "first_token_seconds": 2.0,
        "token_seconds": 2 / 3,  # of the first choice: four tokens from 2 to 4 s, when the other came
        "prompt_tokens": 2,
        "cached_tokens": 4,
        "completion_tokens": 6,
        "finish": "stop,stop",
    }
    await api.complete("a", max_tokens=1)
    assert "token_seconds" not in api.request.notes

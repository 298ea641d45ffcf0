"""Faults that users reported of servers like this one, as far as the API layer decides the answer.

Each test bears the id of its case. Where the contract refuses what a case asks for (several choices, echo, content
parts, tools), the right answer is the refusal.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from tests.openai.fakes import EOS, Api, RecordedReply, fixed
from tlserve.errors import InternalFault, Overloaded

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STREAMS = pytest.mark.parametrize("stream", [False, True])


def error_of(reply: RecordedReply) -> tuple[int, str | None, str | None]:
    """Status, param and code; the reply is one whole error document."""
    assert dict(reply.headers)["Content-Type"] == "application/json"
    detail = reply.json["error"]
    assert list(detail) == ["message", "type", "param", "code"]
    return reply.status, detail["param"], detail["code"]


def answer_of(reply: RecordedReply) -> tuple[str, str]:
    """Text and finish_reason of the only choice, streamed or not."""
    assert reply.status == 200
    if reply.writes:
        choices = [c for event in reply.events if isinstance(event, dict) for c in event["choices"]]
        texts = [c["text"] if "text" in c else c["delta"]["content"] for c in choices]
        return "".join(texts), choices[-1]["finish_reason"]
    choice = reply.json["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


@STREAMS
async def test_b002_held_back_text_is_sent_when_generation_ends_otherwise(stream: bool) -> None:
    api = Api(fixed(256, 257, EOS), pieces=[b"sky", b"?"])
    assert answer_of(await api.complete("P", stop=["?!"], stream=stream)) == ("sky?", "stop")
    assert answer_of(await api.complete("P", stop=["?!"], stream=stream, max_tokens=2)) == ("sky?", "length")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model":"succ","messages":[{"role":"user","content":"x \\ud83d y"}]}', "messages"),
        (b'{"model":"succ","messages":[{"role":"\\ud83d","content":"x"}]}', "messages"),
        (b'{"model":"\\ud83d","messages":[{"role":"user","content":"x"}]}', "model"),
        (b'{"model":"succ","messages":[{"role":"user","content":"x"}],"stop":"\\udc00"}', "stop"),
        (b'{"model":"succ","messages":[{"role":"user","content":"x"}],"user":"\\ud83d"}', None),
        (b'{"model":"succ","messages":[{"role":"user","content":"x"}],"tools":[{"\\ud83d":1}]}', "tools"),
        (b'{"model":"succ","messages":[{"role":"user","content":"x"}],"stream":true,"foo":"\\ud83d"}', None),
    ],
)
async def test_b016_lone_surrogates_are_refused_wherever_they_stand(raw: bytes, param: str | None) -> None:
    assert error_of(await Api().call(CHAT, raw)) == (400, param, None)
    in_prompt = "prompt" if param == "messages" else param
    assert error_of(await Api().call(COMPLETION, raw.replace(b"messages", b"prompt"))) == (400, in_prompt, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ['"temperature":%s', '"top_p":%s', '"presence_penalty":%s', '"logit_bias":{"5":%s}', '"foo":[%s]']
)
async def test_b017_numbers_that_are_not_finite_are_refused(number: str, field: str) -> None:
    reply = await Api().call(COMPLETION, ('{"model":"succ","prompt":"a",' + field % number + "}").encode())
    assert error_of(reply) == (400, None if "foo" in field else field.split('"')[1], None)


async def test_b020_null_is_the_same_as_absent() -> None:
    names = """max_tokens max_completion_tokens temperature top_p n stop seed stream stream_options logit_bias logprobs
        top_logprobs presence_penalty frequency_penalty user tools tool_choice response_format top_k min_p min_tokens
        repetition_penalty stop_token_ids ignore_eos metadata store service_tier parallel_tool_calls"""
    nulls = dict.fromkeys(names.split())
    api = Api(default_seed=1)
    plain, null = (await api.chat("a")).json, (await api.chat("a", **nulls)).json
    assert api.loop.requests[0] == api.loop.requests[1]
    assert {k: v for k, v in plain.items() if k not in ("id", "created")} == {
        k: v for k, v in null.items() if k not in ("id", "created")
    }
    await api.complete("a")
    await api.complete("a", **nulls, echo=None, suffix=None, best_of=None)
    assert api.loop.requests[2] == api.loop.requests[3]


async def test_b026_echo_is_refused() -> None:
    reply = await Api().complete("a", echo=True, logprobs=2, max_tokens=1)
    assert error_of(reply) == (422, "echo", "unsupported_parameter")


async def test_b029_prompts_of_a_list_are_admitted_together_or_not_at_all() -> None:
    api = Api()
    api.loop.refusals = [Overloaded("full")]
    assert error_of(await api.complete(["a", "b", "c"]))[0] == 429
    assert api.loop.requests == []
    assert error_of(await api.complete(["a", "b", "c"], n=2)) == (422, "n", "unsupported_parameter")


@pytest.mark.parametrize("cut", [1, 2, 3])
@STREAMS
async def test_b055_an_incomplete_character_at_the_end_is_one_replacement_character(cut: int, stream: bool) -> None:
    emoji = "a😀".encode()
    reply = await Api(fixed(emoji)).complete("P", max_tokens=1 + cut, stream=stream)
    assert answer_of(reply) == ("a�", "length")
    reply = await Api(fixed(emoji[: 1 + cut], EOS)).complete("P", stream=stream)
    assert answer_of(reply) == ("a�", "stop")
    whole = await Api(fixed(emoji)).complete("P", max_tokens=1 + cut)
    assert whole.json["usage"]["completion_tokens"] == 1 + cut


async def test_b057_invalid_bytes_in_the_output_are_valid_json() -> None:
    reply = await Api(fixed(b"\xfe\xc0\x00\x80a", EOS)).chat("P")
    assert answer_of(reply) == ("��\x00�a", "stop")
    reply = await Api().call(CHAT, b'{"model":"\xff\xfe"}')
    assert error_of(reply)[0] == 400
    assert b"\xff" not in reply.body


@pytest.mark.parametrize(("stop", "text"), [("E", "D"), ("EF", "D"), ("FG", "DE")])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@STREAMS
async def test_b059_b062_a_stop_inside_or_across_tokens_ends_every_kind_of_answer(
    stop: str, text: str, path: str, stream: bool
) -> None:
    api = Api(fixed(256, 257, EOS), pieces=[b"DEF", b"GH"])
    call = api.chat if path == CHAT else api.complete
    assert answer_of(await call("P", stop=[stop], stream=stream)) == (text, "stop")


async def test_b060_text_is_sent_at_once_when_nothing_matches() -> None:
    reply = await Api(fixed(b"hello", EOS)).complete("P", stop="z" * 30, stream=True)
    assert [event["choices"][0]["text"] for event in reply.events[:-1]] == [*"hello", ""]


@STREAMS
async def test_b064_stops_match_the_output_alone_and_the_earliest_place_wins(stream: bool) -> None:
    assert answer_of(await Api(fixed(b"y", EOS)).complete("x###", stop="###", stream=stream)) == ("y", "stop")
    assert answer_of(await Api(fixed(b"c", EOS)).complete("ab", stop="abc", stream=stream)) == ("c", "stop")
    assert answer_of(await Api(fixed(b"xyz", EOS)).complete("P", stop=["yz", "xy"], stream=stream)) == ("", "stop")


@pytest.mark.parametrize("stop", ["", [""], 5, [5], {}, ["a"] * 5])
@STREAMS
async def test_b065_bad_stops_are_refused_before_the_response(stop: object, stream: bool) -> None:
    api = Api()
    status, param, code = error_of(await api.complete("P", stop=stop, stream=stream))
    assert (status, code) == (400, None)
    assert param is not None
    assert param.startswith("stop")
    assert api.loop.requests == []


async def test_b065_unusual_stops_work() -> None:
    assert answer_of(await Api(fixed(b"a\nb", EOS)).complete("P", stop="\n")) == ("a", "stop")
    assert answer_of(await Api(fixed("a😀b".encode(), EOS)).complete("P", stop=["😀"])) == ("a", "stop")
    assert answer_of(await Api(fixed(b"aaa", EOS)).complete("P", stop="a" * 10**6)) == ("aaa", "stop")
    assert answer_of(await Api(fixed(b"a", EOS)).complete("P", stop=[])) == ("a", "stop")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@STREAMS
async def test_b066_the_finish_reason_says_why(path: str, stream: bool) -> None:
    for script, fields, reason in ((b"abcd", {"max_tokens": 3}, "length"), (b"ab", {}, "stop")):
        api = Api(fixed(script, EOS))
        call = api.chat if path == CHAT else api.complete
        assert answer_of(await call("P", stream=stream, **fields))[1] == reason
    document = (await Api().complete(["a", "c"], max_tokens=3, stop="de")).json
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length", "stop"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_b067_finish_reason_is_null_until_the_last_chunk(path: str) -> None:
    api = Api(fixed(b"abc", EOS))
    reply = await (api.chat if path == CHAT else api.complete)("P", stream=True)
    reasons = [event["choices"][0]["finish_reason"] for event in reply.events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_b069_usage_is_sent_only_when_asked_for(path: str, options: object) -> None:
    api = Api(fixed(b"abc", EOS))
    reply = await (api.chat if path == CHAT else api.complete)("P", stream=True, stream_options=options)
    assert all("usage" not in event and event["choices"] for event in reply.events[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_b069_usage_is_one_chunk_without_choices_before_done(path: str) -> None:
    for fields in ({"max_tokens": 2}, {"stop": "bc"}, {}):
        api = Api(fixed(b"abc", EOS))
        call = api.chat if path == CHAT else api.complete
        reply = await call("P", stream=True, stream_options={"include_usage": True}, **fields)
        *chunks, usage, done = reply.events
        assert done == "[DONE]"
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", [{"stream": False}, {}])
async def test_b070_stream_options_without_stream_are_refused(fields: dict[str, object]) -> None:
    reply = await Api().chat("a", stream_options={"include_usage": True}, **fields)
    assert error_of(reply) == (400, "stream_options", None)


async def test_b072_errors_in_a_stream_are_plain_before_it_and_one_event_inside() -> None:
    assert error_of(await Api().chat("a", stream=True, n=0)) == (400, "n", None)
    reply = await Api(fixed(b"b", InternalFault("broken"))).chat("a", stream=True)
    assert reply.events[-1]["error"]["code"] == "internal_error"
    assert b"[DONE]" not in reply.body
    assert b'"finish_reason":"' not in reply.body


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 65},
        {"max_tokens": 64},
        {"stop": [""]},
        {"logit_bias": {"999999": 1}},
        {"model": "other"},
        {"seed": 2**63},
        {"best_of": 2},
    ],
    ids=str,
)
async def test_b073_a_stream_is_refused_as_a_whole_answer_is(fields: dict[str, object]) -> None:
    replies = [await Api().complete(**{"prompt": "a", "stream": stream, **fields}) for stream in (False, True)]
    assert error_of(replies[0]) == error_of(replies[1])
    assert replies[0].status in (400, 404, 422)
    assert replies[0].body == replies[1].body


async def test_b076_top_k_is_clamped_or_refused() -> None:
    api = Api()
    used = {0: 0, -1: 0, 1: 1, 256: 256, 257: 256, 2**31: 256, 2**63: 256}
    for top_k, expected in used.items():
        assert (await api.complete("a", top_k=top_k)).status == 200
        assert api.loop.requests[-1].params.top_k == expected
    bad: tuple[object, ...] = (0.01, -2, "5")
    for wrong in bad:
        assert error_of(await api.complete("a", top_k=wrong)) == (400, "top_k", None)


@pytest.mark.parametrize("bias", [{"999999": 5}, {"-1": 1}, {"x": 1}, {"5": 101}, {str(i): 1 for i in range(10_000)}])
async def test_b078_bad_biases_are_refused(bias: dict[str, int]) -> None:
    assert error_of(await Api().complete("a", logit_bias=bias)) == (400, "logit_bias", None)


async def test_b079_huge_counts_are_refused_at_once() -> None:
    for n in (10**6, 2**31):
        assert error_of(await Api().complete("a", n=n)) == (422, "n", "unsupported_parameter")
        assert error_of(await Api().complete("a", best_of=n)) == (422, "best_of", "unsupported_parameter")
    for max_tokens in (10**9, 2**63, 10**100):
        reply = await Api().complete("a", max_tokens=max_tokens)
        assert error_of(reply) == (400, "max_tokens", "context_length_exceeded")


async def test_b080_max_completion_tokens_is_honoured_and_wins() -> None:
    for fields, num_tokens in (
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 7}, 3),
        ({"max_completion_tokens": 7, "max_tokens": 3}, 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
    ):
        assert (await Api().chat("a", **fields)).json["usage"]["completion_tokens"] == num_tokens
    for bad in (0, -1):
        assert error_of(await Api().chat("a", max_completion_tokens=bad)) == (400, "max_completion_tokens", None)


@STREAMS
async def test_b081_the_context_is_filled_to_the_last_token_and_no_further(stream: bool) -> None:
    for call in (Api(fixed(b"bcd")).chat, Api(fixed(b"bcd")).complete):
        assert answer_of(await call("a" * 63, stream=stream)) == ("b", "length")
        for num_tokens in (64, 65, 640):
            reply = await call("a" * num_tokens, stream=stream)
            assert error_of(reply)[0::2] == (400, "context_length_exceeded")
            message = reply.json["error"]["message"]
            assert str(num_tokens) in message
            assert "64" in message


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None])
async def test_b083_empty_prompts_are_refused(prompt: object) -> None:
    status, param, code = error_of(await Api().complete(prompt))
    assert (status, code) == (400, None)
    assert param in ("prompt", "prompt[0]")
    assert error_of(await Api().call(CHAT, {"model": "succ", "messages": []})) == (400, "messages", None)
    assert error_of(await Api().call(COMPLETION, {"model": "succ"})) == (400, "prompt", None)
    assert error_of(await Api().chat("")) == (400, "messages", None)  # its template renders nothing


async def test_b085_max_tokens_0_is_refused() -> None:
    assert error_of(await Api().complete("Yes", max_tokens=0, logprobs=1)) == (400, "max_tokens", None)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
async def test_b086_an_assistant_turn_of_calls_needs_no_content(content: dict[str, object]) -> None:
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    api = Api(template="{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}")
    await api.call(CHAT, {"model": "succ", "messages": turns})
    assert bytes(api.loop.requests[0].prompt) == b"user:a;assistant:;tool:4;"
    reply = await api.call(CHAT, {"model": "succ", "messages": [{"role": "user", "content": None}]})
    assert error_of(reply) == (400, "messages[0].content", None)


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text"}], [], [{"type": 5}]]
)
async def test_b087_content_parts_are_refused(content: object) -> None:
    reply = await Api().call(CHAT, {"model": "succ", "messages": [USER, {"role": "user", "content": content}]})
    assert error_of(reply) == (422, "messages[1].content", "unsupported_parameter")


async def test_b093_a_template_in_the_request_is_ignored() -> None:
    api = Api(default_seed=1)
    await api.chat("a")
    await api.chat("a", chat_template="{{1}}", chat_template_kwargs={"messages": [], "tokenize": 1})
    assert api.loop.requests[0] == api.loop.requests[1]


async def test_b098_b099_base64_is_the_same_float32s() -> None:
    api = Api()
    fields = {"model": "succ", "input": "a"}
    floats = (await api.call("/v1/embeddings", {**fields, "encoding_format": "float"})).json["data"][0]["embedding"]
    text = (await api.call("/v1/embeddings", {**fields, "encoding_format": "base64"})).json["data"][0]["embedding"]
    assert list(struct.unpack("<4f", base64.b64decode(text, validate=True))) == floats
    null = (await api.call("/v1/embeddings", {**fields, "encoding_format": None})).json["data"][0]["embedding"]
    assert null == floats
    reply = await api.call("/v1/embeddings", {**fields, "encoding_format": "int8"})
    assert error_of(reply) == (400, "encoding_format", None)


async def test_b100_vectors_come_in_the_order_of_their_inputs() -> None:
    alone = (await Api().call("/v1/embeddings", {"model": "succ", "input": "abc"})).json["data"][0]
    data = (await Api().call("/v1/embeddings", {"model": "succ", "input": ["x", "abc"]})).json["data"]
    assert [item["index"] for item in data] == [0, 1]
    assert data[1]["embedding"] == alone["embedding"]


async def test_b102_logprobs_are_given_when_asked_for_in_their_own_form() -> None:
    for k in (0, 1, 5):
        document = (await Api(fixed(b"z", EOS)).complete("a", logprobs=k)).json
        assert [len(top) for top in document["choices"][0]["logprobs"]["top_logprobs"]] == [k + 1, k + 1]
    for k in (0, 20):
        document = (await Api(fixed(b"z", EOS)).chat("a", logprobs=True, top_logprobs=k)).json
        assert [len(entry["top_logprobs"]) for entry in document["choices"][0]["logprobs"]["content"]] == [k, k]
    assert (await Api().chat("a", logprobs=True, max_tokens=1)).json["choices"][0]["logprobs"]["content"]
    assert error_of(await Api().complete("a", logprobs=6)) == (400, "logprobs", None)
    assert error_of(await Api().complete("a", logprobs=True)) == (400, "logprobs", None)
    assert error_of(await Api().chat("a", logprobs=1)) == (400, "logprobs", None)
    assert error_of(await Api().chat("a", logprobs=True, top_logprobs=21)) == (400, "top_logprobs", None)
    assert error_of(await Api().chat("a", top_logprobs=5)) == (400, "top_logprobs", None)


@STREAMS
async def test_b104_joined_logprob_bytes_are_the_bytes_of_the_text(stream: bool) -> None:
    text = "a😀ď漢👨‍👩‍👧é"
    api = Api(fixed(text.encode(), EOS))
    reply = await api.chat("P", logprobs=True, top_logprobs=5, stream=stream)
    parts = reply.events[:-1] if stream else [reply.json]
    entries = [e for part in parts for e in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    assert all(isinstance(entry["token"], str) for entry in entries)
    assert answer_of(reply)[0] == text


async def test_b107_unseeded_requests_draw_apart_and_seeds_are_kept() -> None:
    api = Api()
    for _ in range(8):
        await api.complete("a")
    assert len({request.seed for request in api.loop.requests}) == 8
    await api.complete("a", seed=11)
    assert api.loop.requests[-1].seed == 11
    assert error_of(await api.complete("a", n=4, seed=11)) == (422, "n", "unsupported_parameter")


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"other","model":"succ","messages":[{"role":"user","content":"b","content":"a"}]}',
        b'{"messages":5,"model":"succ","messages":[{"role":5,"role":"user","content":"a"}]}',
    ],
)
async def test_b115_the_last_of_equal_keys_wins(raw: bytes) -> None:
    api = Api()
    assert (await api.call(CHAT, raw)).status == 200
    assert bytes(api.loop.requests[0].prompt) == b"a"


async def test_b125_cached_tokens_are_those_of_the_engine() -> None:
    document = (await Api().complete(["a", "b", "c"])).json
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


FIELDS: dict[str, object] = {
    "temperature": 0.3,
    "top_p": 0.2,
    "top_k": 3,
    "min_p": 0.4,
    "repetition_penalty": 1.7,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "logit_bias": {"5": 9},
    "seed": 99,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_b128_every_declared_field_reaches_the_engine(path: str, field: str) -> None:
    api = Api(default_seed=1)
    call: Any = api.chat if path == CHAT else api.complete
    await call("a")
    await call("a", **{field: FIELDS[field]})
    assert api.loop.requests[0] != api.loop.requests[1]


async def test_b128_fields_that_are_not_served_are_refused_and_unknown_ones_ignored() -> None:
    api = Api(default_seed=1)
    for field, value in (("best_of", 2), ("suffix", "x"), ("response_format", {"type": "json_schema"})):
        assert error_of(await api.complete("a", **{field: value})) == (422, field, "unsupported_parameter")
    await api.complete("a", foo=1)
    await api.complete("a")
    assert api.loop.requests[0] == api.loop.requests[1]


async def test_errors_are_json_that_any_parser_reads() -> None:
    reply = await Api().call(CHAT, b'{"model":"\\u2028\\u0000","messages":[{"role":"user","content":"a"}]}')
    assert json.loads(reply.body.decode())["error"]["code"] == "model_not_found"

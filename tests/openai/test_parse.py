"""Every request field: what it takes, what it refuses and with which words of the error document."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tlserve.engine.request import SamplingParams
from tlserve.errors import ApiError, InvalidRequest, UnsupportedParameter
from tlserve.openai.parse import (
    GenSpec,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_embeddings,
    parse_tokenize,
)

USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def raw(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def chat(**fields: object) -> Any:
    return parse_chat(raw(**{"model": "m", "messages": [USER], **fields}))


def complete(**fields: object) -> Any:
    return parse_completion(raw(**{"model": "m", "prompt": "p", **fields}))


def embed(**fields: object) -> Any:
    return parse_embeddings(raw(**{"model": "m", "input": "a", **fields}))


# (field, value)
SHARED_BAD: list[tuple[str, object]] = [
    ("model", None),
    ("model", 5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 0.01),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", "0"),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"9" * 400: 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": -100.5}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": None}),
    ("logit_bias", []),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1e30),
    ("seed", 0.5),
    ("seed", "1"),
    ("stop", ""),
    ("stop", 5),
    ("stop", {}),
    ("stop", ["a"] * 5),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("min_tokens", -1),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("stream", "yes"),
    ("stream", 0),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {}),
    ("stream_options", "x"),
    ("tools", "x"),
    ("tools", {}),
    ("tool_choice", "sometimes"),
    ("tool_choice", 5),
    ("response_format", "json"),
    ("response_format", []),
]
CHAT_BAD: list[tuple[str, object]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", {}),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", -1),
    ("logprobs", 1),
    ("logprobs", "true"),
    ("top_logprobs", 5),
    ("top_logprobs", 0),
]
COMPLETION_BAD: list[tuple[str, object]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", ["a"] * 65),
    ("logprobs", -1),
    ("logprobs", 6),
    ("logprobs", True),
    ("logprobs", False),
    ("echo", "yes"),
    ("best_of", 0),
    ("best_of", -1),
    ("suffix", 5),
]
EMBEDDING_BAD: list[tuple[str, object]] = [
    ("model", None),
    ("input", None),
    ("input", ""),
    ("input", []),
    ("input", 5),
    ("input", ["a"] * 2049),
    ("encoding_format", "int8"),
    ("encoding_format", 5),
    ("dimensions", 0),
    ("dimensions", "4"),
]


def refused(call: Any, fields: dict[str, object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [(call, *case) for call in (chat, complete) for case in SHARED_BAD]
    + [(chat, *case) for case in CHAT_BAD]
    + [(complete, *case) for case in COMPLETION_BAD]
    + [(embed, *case) for case in EMBEDDING_BAD],
)
def test_a_bad_value_is_400_with_its_field_as_param(call: Any, field: str, value: object) -> None:
    error = refused(call, {field: value})
    assert (type(error), error.status, error.code, error.param) == (InvalidRequest, 400, None, field)
    assert error.message.startswith(field)


NESTED_BAD = [
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "function", "content": "a"}]}, "messages[1].role"),
    ({"messages": [{"role": "User", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None, "tool_calls": [CALL]}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "messages[1].content"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
]


@pytest.mark.parametrize(("fields", "param"), NESTED_BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_value_inside_a_field_is_named_by_its_place(fields: dict[str, object], param: str) -> None:
    error = refused(chat, fields)
    assert (error.status, error.code, error.param) == (400, None, param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([[True]], "prompt[0][0]"),
        ([1, True], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([1, "a"], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([[-1]], "prompt[0][0]"),
        ([["a"]], "prompt[0][0]"),
        ([{}], "prompt[0]"),
    ],
)
def test_a_bad_prompt_in_a_list_is_named_by_its_place(prompt: object, param: str) -> None:
    assert refused(complete, {"prompt": prompt}).param == param
    assert refused(embed, {"input": prompt}).param == param.replace("prompt", "input")


SHARED_UNSUPPORTED: list[tuple[str, object]] = [
    ("n", 2),
    ("n", 10**6),
    ("n", 2**31),
    ("n", 10**30),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tools", [5]),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
]


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [(call, *case) for call in (chat, complete) for case in SHARED_UNSUPPORTED]
    + [(complete, "echo", True), (complete, "best_of", 2), (complete, "best_of", 2**31), (complete, "suffix", "x")],
)
def test_a_right_value_that_is_not_served_is_422(call: Any, field: str, value: object) -> None:
    error = refused(call, {field: value})
    assert (type(error), error.status, error.param) == (UnsupportedParameter, 422, field)
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "content", [[], [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "x"}], [5]]
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_content_as_a_list_of_parts_is_422(role: str, content: object) -> None:
    error = refused(chat, {"messages": [USER, {"role": role, "content": content}]})
    assert (error.status, error.param) == (422, "messages[1].content")


HARMLESS: list[dict[str, object]] = [
    {"n": 1},
    {"n": 1.0},
    {"tools": []},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"stop": []},
    {"logit_bias": {}},
    {"stop_token_ids": []},
    {"stream_options": None},
    {"stream": False},
    {"temperature": 1},
    {"top_p": 1.0},
    {"top_k": -1},
    {"top_k": 0},
    {"user": 5, "metadata": {}, "store": True, "service_tier": "auto", "prompt_cache_key": "x"},
    {"parallel_tool_calls": True, "reasoning_effort": "high"},
    {"foo": 1, "chat_template": "{{1}}", "chat_template_kwargs": {"tokenize": 1}},
]


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_defaults_and_ignored_fields_change_nothing(call: Any, fields: dict[str, object]) -> None:
    assert call(**fields) == call()


@pytest.mark.parametrize("fields", [{"echo": False}, {"best_of": 1}, {"suffix": ""}, {"logprobs": None}], ids=str)
def test_completion_fields_without_effect_are_fine(fields: dict[str, object]) -> None:
    assert complete(**fields) == complete()


def test_everything_that_is_set_arrives() -> None:
    spec = complete(
        prompt=[["x", [1, 2]][0], [1, 2]],
        max_tokens=7.0,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"0": -100, "7": 1.5},
        logprobs=3,
        seed=-5,
        stop=["a", "b"],
        stop_token_ids=[3, 4, 3],
        ignore_eos=True,
        min_tokens=2,
        stream=True,
        stream_options={"include_usage": True, "other": 1},
    )
    assert spec.prompts == ["x", [1, 2]]
    assert spec.is_list
    assert spec.gen == GenSpec(
        model="m",
        max_tokens=7,
        max_tokens_param="max_tokens",
        is_max_tokens_given=True,
        params=SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias=((0, -100.0), (7, 1.5)),
            num_logprobs=3,
        ),
        seed=-5,
        stop=("a", "b"),
        stop_token_ids=frozenset({3, 4}),
        ignore_eos=True,
        min_tokens=2,
        stream=True,
        include_usage=True,
    )


def test_a_prompt_of_ids_is_one_prompt_and_a_list_of_lists_is_many() -> None:
    assert complete(prompt=[1, 2.0, 3]).prompts == [[1, 2, 3]]
    assert not complete(prompt=[1]).is_list
    assert complete(prompt=[[1], "a"]).prompts == [[1], "a"]
    assert len(complete(prompt=["a"] * 64).prompts) == 64
    assert len(embed(input=["a"] * 2048).inputs) == 2048


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({}, None, "max_tokens"),
        ({"max_tokens": 5}, 5, "max_tokens"),
        ({"max_completion_tokens": 3}, 3, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 7}, 3, "max_completion_tokens"),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5, "max_tokens"),
        ({"max_tokens": 2**63}, 2**63, "max_tokens"),
    ],
)
def test_max_completion_tokens_wins_over_max_tokens(
    fields: dict[str, object], expected: int | None, param: str
) -> None:
    gen = chat(**fields).gen
    assert (gen.max_tokens, gen.max_tokens_param) == (expected, param)


def test_completions_default_to_16_tokens_that_give_way_to_the_context() -> None:
    gen = complete().gen
    assert (gen.max_tokens, gen.is_max_tokens_given) == (16, False)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert refused(chat, {"min_tokens": 6, "max_completion_tokens": 5}).param == "min_tokens"
    assert chat(min_tokens=5, max_completion_tokens=5).gen.min_tokens == 5


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_logprobs_are_asked_for_by_a_flag_and_a_number(
    fields: dict[str, object], num_logprobs: int | None
) -> None:
    assert chat(**fields).gen.params.num_logprobs == num_logprobs


def test_more_than_20_top_logprobs_are_refused() -> None:
    assert refused(chat, {"logprobs": True, "top_logprobs": 21}).param == "top_logprobs"
    assert refused(chat, {"logprobs": True, "top_logprobs": -1}).param == "top_logprobs"


@pytest.mark.parametrize(("temperature", "used"), [(0, 0.0), (1e-6, 0.0), (1e-300, 0.0), (1e-5, 1e-5), (2, 2.0)])
def test_a_temperature_that_decides_everything_is_greedy(temperature: float, used: float) -> None:
    assert chat(temperature=temperature).gen.params.temperature == used


def test_extreme_numbers_stay_within_what_float32_can_hold() -> None:
    assert chat(top_p=1e-300).gen.params.top_p == 1e-6
    assert chat(repetition_penalty=1e308).gen.params.repetition_penalty == 1e6
    assert chat(repetition_penalty=1e-308).gen.params.repetition_penalty == 1e-6


def test_messages_arrive_as_templates_read_them() -> None:
    spec = chat(
        messages=[
            {"role": "developer", "content": "d", "unknown": 1},
            {"role": "user", "content": "", "name": "bob"},
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "extra": 1}]},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "x", "tool_calls": None},
        ]
    )
    assert spec.messages == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "x"},
    ]


def test_tokenize_takes_text_or_messages() -> None:
    assert parse_tokenize(raw(model="m", text="")).text == ""
    assert parse_tokenize(raw(model="m", messages=[USER])).messages == [USER]
    assert parse_tokenize(raw(model="m", text="a", add_special_tokens=True)).add_special_tokens
    assert not parse_tokenize(raw(model="m", text="a", add_special_tokens=None)).add_special_tokens
    for fields in ({}, {"text": "a", "messages": [USER]}, {"text": 5}, {"text": None}):
        with pytest.raises(InvalidRequest) as caught:
            parse_tokenize(raw(model="m", **fields))
        assert caught.value.param == "text"


def test_detokenize_takes_a_list_of_ids() -> None:
    assert parse_detokenize(raw(model="m", tokens=[1, 2.0])).tokens == [1, 2]
    assert parse_detokenize(raw(model="m", tokens=[])).tokens == []
    for tokens in (None, "x", [-1], ["a"], [True], [0.5]):
        with pytest.raises(InvalidRequest):
            parse_detokenize(raw(model="m", tokens=tokens))

"""Invariant: any value in any field of any route is taken, or refused before the answer begins, with the field named.

The table below says once more, in plain predicates, what docs/api.md says of each field; Hypothesis puts values of
every kind, size and depth into them. A refusal is one whole error document whose ``param`` is the field; never a 5xx,
and never an event in a stream that has begun. Whatever happens, the engine is left with nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from tests.openai.fakes import HIDDEN_SIZE, MAX_MODEL_LEN, Api, RecordedReply
from tlserve.openai import requests

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
VOCAB_SIZE = 256
LEFT = MAX_MODEL_LEN - 1  # of the context, after the prompt "a"
API = Api()
Test = Callable[[Any], bool]


def number(low: float, high: float) -> Test:
    return lambda value: type(value) in (int, float) and low <= value <= high


def integer(low: float, high: float) -> Test:
    return lambda value: type(value) is int and low <= value <= high


def above(limit: float, then: Test) -> Test:
    return lambda value: then(value) and value > limit


def one_of(*choices: object) -> Test:
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def listed(item: Test, most: float = float("inf"), least: int = 0) -> Test:
    return lambda value: type(value) is list and least <= len(value) <= most and all(map(item, value))


def either(*tests: Test) -> Test:
    return lambda value: any(test(value) for test in tests)


def mapping(**fields: Test) -> Test:
    """An object whose fields, where it has them, are like that."""
    return lambda value: type(value) is dict and all(test(value.get(name)) for name, test in fields.items())


def null(value: Any) -> bool:
    return value is None


def anything(value: Any) -> bool:
    return True


def nothing(value: Any) -> bool:
    return False


def text(value: Any) -> bool:
    return type(value) is str


def filled(value: Any) -> bool:
    return type(value) is str and value != ""


def fits(value: Any) -> bool:
    """Text that leaves room for the answer of four tokens that the requests here ask for."""
    return filled(value) and len(value.encode()) <= MAX_MODEL_LEN - 4


def bias(value: Any) -> bool:
    return type(value) is dict and all(
        re.fullmatch("0|[1-9][0-9]{0,2}", key) and int(key) < VOCAB_SIZE and number(-100, 100)(given)
        for key, given in value.items()
    )


flag = either(one_of(True), one_of(False))
token_id = integer(0, VOCAB_SIZE - 1)
ids = listed(token_id, MAX_MODEL_LEN - 4, 1)
call = mapping(id=text, type=either(null, one_of("function")), function=mapping(name=text, arguments=text))


@dataclass(frozen=True)
class Field:
    takes: Test  # 200; null is taken as well where the field is not required
    unserved: Test = nothing  # 422, of what is not taken
    required: bool = False
    partner: tuple[str, Any] | None = None  # a field that must be there beside it


GENERATION = {
    "model": Field(one_of("succ"), required=True),
    "max_tokens": Field(integer(1, LEFT)),
    "temperature": Field(number(0, 2)),
    "top_p": Field(above(0, number(0, 1))),
    "top_k": Field(integer(-1, float("inf"))),
    "min_p": Field(number(0, 1)),
    "repetition_penalty": Field(above(0, number(0, sys.float_info.max))),
    "presence_penalty": Field(number(-2, 2)),
    "frequency_penalty": Field(number(-2, 2)),
    "logit_bias": Field(bias),
    "seed": Field(integer(-(2**63), 2**63 - 1)),
    "stop": Field(either(filled, listed(filled, 4))),
    "stop_token_ids": Field(listed(token_id)),
    "ignore_eos": Field(flag),
    "min_tokens": Field(integer(0, 4)),
    "n": Field(one_of(1), integer(2, float("inf"))),
    "stream_options": Field(mapping(include_usage=either(null, flag)), partner=("stream", True)),
    "tools": Field(one_of([]), listed(anything, least=1)),
    "tool_choice": Field(one_of("none"), either(one_of("auto", "required"), mapping())),
    "response_format": Field(mapping(type=one_of("text")), mapping(type=one_of("json_object", "json_schema"))),
    "user": Field(anything),
    "of_nobody": Field(anything),
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "succ", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    COMPLETIONS: {"model": "succ", "prompt": "a", "max_tokens": 4},
    EMBEDDINGS: {"model": "succ", "input": "a"},
    TOKENIZE: {"model": "succ", "text": "a"},
    DETOKENIZE: {"model": "succ", "tokens": [97]},
}
FIELDS: dict[str, dict[str, Field]] = {
    CHAT: {
        **GENERATION,
        "messages[0].role": Field(one_of("system", "developer", "user", "assistant", "tool"), required=True),
        "messages[0].content": Field(fits, listed(anything), required=True),
        "messages[0].name": Field(text),
        "messages[0].tool_call_id": Field(text),
        "messages[0].tool_calls": Field(listed(call)),
        "max_completion_tokens": Field(integer(1, LEFT)),
        "logprobs": Field(flag),
        "top_logprobs": Field(integer(0, 20), partner=("logprobs", True)),
    },
    COMPLETIONS: {
        **GENERATION,
        "prompt": Field(either(fits, ids, listed(either(fits, ids), 64, 1)), required=True),
        "logprobs": Field(integer(0, 5)),
        "echo": Field(one_of(False), one_of(True)),
        "best_of": Field(one_of(1), integer(2, float("inf"))),
        "suffix": Field(one_of(""), filled),
    },
    EMBEDDINGS: {
        "model": GENERATION["model"],
        "input": Field(either(fits, ids, listed(either(fits, ids), 2048, 1)), required=True),
        "encoding_format": Field(one_of("float", "base64")),
        "dimensions": Field(one_of(HIDDEN_SIZE), integer(1, float("inf"))),
        "user": Field(anything),
    },
    TOKENIZE: {
        "model": GENERATION["model"],
        "text": Field(text, required=True),
        "add_special_tokens": Field(flag),
        "of_nobody": Field(anything),
    },
    DETOKENIZE: {"model": GENERATION["model"], "tokens": Field(listed(token_id), required=True)},
}
ROWS = [(path, name) for path, fields in FIELDS.items() for name in fields]
STREAMS = {CHAT, COMPLETIONS}

EDGES: list[Any] = [
    *(0, 1, -1, 2, 3, 4, 5, 20, 21, 63, 64, 255, 256, -100, 101, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 2.1, -2.5, 1e-7, 5e-324, 1e30, 1.7e308, True, False, None),
    *("", "a", "5", "none", "auto", "text", "succ", "true", "\0", "\u2028", "😀", "e\u0301" * 40, "x" * 5000),
    *([], [0], [1.5], [256], ["a"], [""], [[]], [[97]], ["a", [97]], ["a", 97], [None], [True], ["a"] * 5, ["a"] * 70),
    *({}, {"0": 1}, {"0": 101}, {"256": 1}, {"00": 1}, {"x": 1}, {"type": "text"}, {"type": "json_object"}),
    *({"include_usage": 1}, {"include_usage": True}, [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.sampled_from(EDGES) | st.recursive(
    st.sampled_from(EDGES) | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["0", "97", "type", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)
# What no field may hold, as it stands in the text of a body.
POISON = {
    "NaN": b"NaN",
    "Infinity": b"[1,-Infinity]",
    "past float64": b"1e999",
    "past the digits that are read": b"9" * 5000,
    "a lone high surrogate": rb'"x\ud83d"',
    "a lone low surrogate": rb'["\ude00 and more text"]',
    "a lone surrogate in a key": rb'{"\ud83d":1}',
    "no UTF-8": b'"\xff"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "a raw control character": b'"\n"',
    "a leading zero": b"01",
    "a word": b"tru",
    "65 levels": b"[" * 64 + b"]" * 64,
    "a thousand levels": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "levels without end": b"[" * 40_000,
}


def put(body: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """A copy of ``body`` with ``value`` in the place that ``name`` says."""
    copy: Any = json.loads(json.dumps(body))
    place = copy
    *way, last = re.findall(r"\w+", name)
    for part in way:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return copy  # type: ignore[no-any-return]


def normal(value: Any) -> Any:
    """Integral floats are integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [normal(item) for item in value]
    if isinstance(value, dict):
        return {key: normal(item) for key, item in value.items()}
    return value


def expected(field: Field, value: object, name: str) -> int:
    value = normal(value)
    if value is None and not field.required:
        return 200
    if field.takes(value):
        return 200
    if field.unserved(value):
        return 422
    return 404 if name == "model" and text(value) else 400


async def ask(path: str, body: object) -> RecordedReply:
    """Send it; what must hold of any answer holds."""
    reply = await API.call(path, body)
    assert API.loop.num_inside == 0
    API.loop.requests.clear()
    assert reply.status in (200, 400, 404, 422), reply.body
    if reply.status == 200:
        if reply.writes:
            assert reply.events[-1] == "[DONE]"
            assert not any("error" in event for event in reply.events[:-1])
        return reply
    assert not reply.writes, "a stream began and was invalid then"
    assert list(reply.json) == ["error"]
    assert list(reply.json["error"]) == ["message", "type", "param", "code"]
    assert len(reply.json["error"]["message"]) < 500
    return reply


def named(reply: RecordedReply, field: str) -> bool:
    param = reply.json["error"]["param"]
    return param is not None and re.split(r"[.\[]", param)[0] == re.split(r"[.\[]", field)[0]


def with_partner(path: str, name: str, *, stream: bool) -> dict[str, Any]:
    partner = FIELDS[path][name].partner
    return BODIES[path] | ({"stream": stream} if path in STREAMS else {}) | dict([partner] if partner else [])


@given(st.sampled_from(ROWS), VALUES, st.booleans())
@example((CHAT, "repetition_penalty"), 10**400, True)
@example((COMPLETIONS, "top_k"), 2**64, True)
def test_any_value_of_any_field_is_taken_or_refused_by_its_name(
    row: tuple[str, str], value: object, stream: bool
) -> None:
    path, name = row
    field = FIELDS[path][name]
    reply = trio.run(ask, path, put(with_partner(path, name, stream=stream), name, value))
    assert reply.status == expected(field, value, name), (row, value, reply.body)
    assert reply.status == 200 or named(reply, name), (row, value, reply.body)


@pytest.mark.parametrize(("path", "name"), ROWS)
async def test_every_edge_of_every_field(path: str, name: str) -> None:
    """The same for each row with each value of the list, so that none depends on chance."""
    for value in EDGES:
        reply = await ask(path, put(with_partner(path, name, stream=True), name, value))
        assert reply.status == expected(FIELDS[path][name], value, name), (value, reply.body)
        assert reply.status == 200 or named(reply, name), (value, reply.body)


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
async def test_what_no_field_may_hold_is_refused_by_the_name_of_the_field(poison: bytes) -> None:
    for path, name in ROWS:
        raw = json.dumps(put(with_partner(path, name, stream=True), name, "POISON")).encode()
        reply = await ask(path, raw.replace(b'"POISON"', poison))
        assert reply.status == 400, (path, name, reply.body)
        if name not in ("user", "of_nobody"):  # a name that is no field's is not given back
            assert named(reply, name), (path, name, reply.body)


@given(st.sampled_from(sorted(BODIES)), st.data())
def test_any_values_of_any_fields_together(path: str, data: st.DataObject) -> None:
    """Whatever fields do to each other, one of them is named."""
    body = BODIES[path]
    for name in data.draw(st.lists(st.sampled_from(sorted(FIELDS[path])), max_size=5, unique=True)):
        body = put(body, name, data.draw(VALUES))
    if path in STREAMS and data.draw(st.booleans()):
        body = body | {"stream": True}
    reply = trio.run(ask, path, body)
    assert reply.status == 200 or any(named(reply, name) for name in {*FIELDS[path], *BODIES[path], "stream"})


@given(st.sampled_from(sorted(BODIES)), st.integers(0, 200), st.integers(0, 3), st.binary(max_size=4))
def test_a_body_with_some_bytes_changed(path: str, place: int, length: int, inserted: bytes) -> None:
    raw = json.dumps(BODIES[path]).encode()
    trio.run(ask, path, raw[:place] + inserted + raw[place + length :])


def test_the_table_knows_every_field() -> None:
    structs = {
        CHAT: requests.ChatRequest,
        COMPLETIONS: requests.CompletionRequest,
        EMBEDDINGS: requests.EmbeddingRequest,
        TOKENIZE: requests.TokenizeRequest,
        DETOKENIZE: requests.DetokenizeRequest,
    }
    for path, struct in structs.items():
        known = {re.split(r"[.\[]", name)[0] for name in FIELDS[path]} | {"stream"}
        assert set(struct.__struct_fields__) - known <= ({"messages"} if path == TOKENIZE else set())

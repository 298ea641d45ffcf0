"""How a body is read: what is JSON, what a value may be, what is ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tlserve.conform.case import Cases
from tlserve.conform.subject import CHAT, Subject

CASES = Cases("api.md#bodies")


def _body(server: Subject, extra: str = "") -> bytes:
    """A good body with the text ``extra``, which begins with a comma, before its closing brace."""
    return (json.dumps(server.chat_body(max_tokens=2))[:-1] + extra + "}").encode()


async def _are_refused(server: Subject, bodies: Sequence[bytes]) -> None:
    (await server.post(CHAT, _body(server))).has_status(200)
    for body in bodies:
        (await server.post(CHAT, body)).refuses(400)


@CASES.add("json.invalid", "what is not one JSON object is 400")
async def invalid(server: Subject) -> None:
    good = _body(server)
    await _are_refused(server, [b"", b"{", b"nothing", b"[]", b"null", b'"text"', good[:-1], good + b"}", good * 2])


@CASES.add("json.nan", "NaN, Infinity and numbers past a double are 400")
async def nan(server: Subject) -> None:
    values = ("NaN", "Infinity", "-Infinity", "1e999")
    await _are_refused(server, [_body(server, f', "temperature": {value}') for value in values])


@CASES.add("json.surrogates", "a lone surrogate is 400, in values and in keys")
async def surrogates(server: Subject) -> None:
    extras = (r', "stop": "x \ud83d y"', r', "user": "\udc00"', r', "\ud83d": 1')
    await _are_refused(server, [_body(server, extra) for extra in extras])


@CASES.add("json.utf8", "bytes that are not UTF-8 are 400")
async def utf8(server: Subject) -> None:
    good = _body(server, ', "user": "?"')
    await _are_refused(server, [good.replace(b'"?"', b'"' + bad + b'"') for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80")])


@CASES.add("json.nesting", "more than 64 levels are 400")
async def nesting(server: Subject) -> None:
    (await server.post(CHAT, _body(server, ', "x": ' + "[" * 60 + "]" * 60))).has_status(200)
    await _are_refused(server, [_body(server, ', "x": ' + "[" * depth + "]" * depth) for depth in (65, 5000)])


@CASES.add("json.duplicate_keys", "of two equal keys the last wins")
async def duplicate_keys(server: Subject) -> None:
    extra = ', "max_tokens": 3, "ignore_eos": true, "max_tokens": 4'
    document = (await server.post(CHAT, _body(server, extra))).has_status(200).document
    document["usage"]["completion_tokens"].equals(4)


@CASES.add("json.integral_floats", "5.0 and 5e0 are integers")
async def integral_floats(server: Subject) -> None:
    for text in ("5.0", "5e0"):
        body = _body(server, f', "ignore_eos": true, "max_tokens": {text}')
        document = (await server.post(CHAT, body)).has_status(200).document
        document["usage"]["completion_tokens"].equals(5)


@CASES.add("json.booleans", "true and false are never numbers, and numbers never true or false")
async def booleans(server: Subject) -> None:
    for fields in ({"max_tokens": True}, {"temperature": False}, {"stream": 0}, {"logprobs": 1}):
        (param,) = fields
        (await server.post(CHAT, server.chat_body(**fields))).refuses(400, param=param)


@CASES.add("json.null", "null for an optional field is the same as leaving it out")
async def null(server: Subject) -> None:
    names = (
        "max_completion_tokens top_p top_k min_p n stop seed stream stream_options logit_bias logprobs top_logprobs "
        "presence_penalty frequency_penalty repetition_penalty stop_token_ids ignore_eos min_tokens user tools "
        "tool_choice response_format metadata"
    )
    plain = await server.chat()
    nulls = await server.chat(**dict.fromkeys(names.split()))
    text = plain["choices"][0]["message"]["content"].value
    nulls["choices"][0]["message"]["content"].equals(text)


@CASES.add("json.unknown_fields", "unknown fields are ignored, a chat_template among them")
async def unknown_fields(server: Subject) -> None:
    plain = await server.chat()
    strange = await server.chat(frobnicate={"a": [1]}, chat_template="{{ 1 }}")
    strange["choices"][0]["message"]["content"].equals(plain["choices"][0]["message"]["content"].value)
    strange["usage"]["prompt_tokens"].equals(plain["usage"]["prompt_tokens"].value)


@CASES.add("json.no_effect", "fields about accounts and services are accepted, and change nothing")
async def no_effect(server: Subject) -> None:
    plain = await server.chat()
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }
    document = await server.chat(**fields)
    document["choices"][0]["message"]["content"].equals(plain["choices"][0]["message"]["content"].value)


@CASES.add("json.off_values", "values that turn an unserved field off are accepted")
async def off_values(server: Subject) -> None:
    await server.chat(n=1, tools=[], tool_choice="none", response_format={"type": "text"})
    await server.complete(n=1, echo=False, best_of=1, suffix="")

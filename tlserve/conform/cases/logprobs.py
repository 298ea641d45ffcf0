"""Log-probabilities, of chat and of completions."""

from __future__ import annotations

import math

from tlserve.conform.case import Cases
from tlserve.conform.found import Found
from tlserve.conform.subject import CHAT, COMPLETIONS, Subject

CASES = Cases("api.md#log-probabilities")


def _entries(document: Found) -> list[Found]:
    return document["choices"][0]["logprobs"]["content"].items()


def _is_logprob(place: Found) -> None:
    place.check(-math.inf < place.number() <= 0, "a finite number of 0 or less")


@CASES.add("chat.logprobs", "there is an entry with token, logprob and bytes for each token", level="core")
async def chat_logprobs(server: Subject) -> None:
    document = await server.chat(logprobs=True, max_tokens=8)
    entries = _entries(document)
    count = document["usage"]["completion_tokens"].integer(1)
    document["choices"][0]["logprobs"]["content"].check(0 < len(entries) <= count, f"up to {count} entries")
    for entry in entries:
        entry["token"].text()
        _is_logprob(entry["logprob"])
        for byte in entry["bytes"].items():
            byte.integer()


@CASES.add("chat.logprobs.top", "top_logprobs gives that many alternatives, the likeliest first", level="core")
async def top(server: Subject) -> None:
    for count in (0, 2, 20):
        for entry in _entries(await server.chat(logprobs=True, top_logprobs=count, max_tokens=3)):
            values = [item["logprob"].number() for item in entry["top_logprobs"].items(count)]
            entry["top_logprobs"].check(values == sorted(values, reverse=True), "from likely to unlikely")


@CASES.add("chat.logprobs.greedy", "at temperature 0 the token is the likeliest alternative")
async def greedy(server: Subject) -> None:
    for entry in _entries(await server.chat(logprobs=True, top_logprobs=1, max_tokens=8)):
        entry["logprob"].equals(entry["top_logprobs"][0]["logprob"].value)


@CASES.add("chat.logprobs.bytes", "the joined bytes are the text")
async def joined_bytes(server: Subject) -> None:
    document = await server.chat(logprobs=True, max_tokens=32, ignore_eos=True)
    data = bytes(byte.integer() for entry in _entries(document) for byte in entry["bytes"].items())
    document["choices"][0]["message"]["content"].equals(data.decode("utf-8", "replace"))


@CASES.add("chat.logprobs.all_tokens", "there is an entry for every generated token")
async def all_tokens(server: Subject) -> None:
    document = await server.chat(logprobs=True, max_tokens=8)
    document["choices"][0]["logprobs"]["content"].items(document["usage"]["completion_tokens"].integer())


@CASES.add("chat.logprobs.stream", "the entries of a stream, joined, are those of the whole answer")
async def streamed(server: Subject) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 24}
    whole = [entry.value for entry in _entries(await server.chat(**fields))]
    answer = await server.stream(CHAT, server.chat_body(**fields))
    places = [choice["logprobs"] for choice in answer.choices() if choice["logprobs"].value is not None]
    joined = Found([entry.value for place in places for entry in place["content"].items()], "entries", answer.sent)
    joined.equals(whole)


@CASES.add("chat.logprobs.raw", "they are of the model's distribution, before bias, penalties and temperature")
async def before_sampling(server: Subject) -> None:
    fields = {"logprobs": True, "top_logprobs": 5, "max_tokens": 1, "seed": 3}
    plain = _entries(await server.chat(**fields))[0]["top_logprobs"].value
    (letter,) = await server.tokens(text="a")
    for changed in ({"temperature": 1.7}, {"logit_bias": {str(letter): 50}}, {"repetition_penalty": 3}):
        _entries(await server.chat(**fields, **changed))[0]["top_logprobs"].equals(plain)


@CASES.add("chat.logprobs.off", "without logprobs there are none")
async def off(server: Subject) -> None:
    for fields in ({}, {"logprobs": False}):
        (await server.chat(**fields, max_tokens=1))["choices"][0]["logprobs"].equals(None)


@CASES.add("completions.logprobs", "tokens, token_logprobs, top_logprobs and text_offset are parallel lists")
async def of_completions(server: Subject) -> None:
    document = await server.complete(logprobs=2, max_tokens=8)
    place = document["choices"][0]["logprobs"]
    count = document["usage"]["completion_tokens"].integer(1)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        place[name].items(count)
    for value in place["token_logprobs"].items():
        _is_logprob(value)
    offsets = [offset.integer() for offset in place["text_offset"].items()]
    place["text_offset"].check(offsets == sorted(offsets) and offsets[0] == 0, "rising from 0")


@CASES.add("completions.logprobs.zero", "logprobs 0 gives the drawn token alone")
async def zero(server: Subject) -> None:
    place = (await server.complete(logprobs=0, max_tokens=4))["choices"][0]["logprobs"]
    for mapping, token in zip(place["top_logprobs"].items(), place["tokens"].items(), strict=True):
        mapping.check(isinstance(mapping.value, dict) and list(mapping.value) == [token.value], "the token alone")


@CASES.add("completions.logprobs.stream", "the lists of a stream, joined, are those of the whole answer")
async def completions_streamed(server: Subject) -> None:
    fields = {"logprobs": 1, "max_tokens": 16}
    whole = (await server.complete(**fields))["choices"][0]["logprobs"]
    answer = await server.stream(COMPLETIONS, server.text_body(**fields))
    places = [choice["logprobs"] for choice in answer.choices() if choice["logprobs"].value is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item.value for place in places for item in place[name].items()]
        Found(joined, name, answer.sent).equals(whole[name].value)

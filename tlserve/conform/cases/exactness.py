"""The same bits every time, whatever else runs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import trio

from tlserve.conform.answer import Answer
from tlserve.conform.case import Cases
from tlserve.conform.found import Found
from tlserve.conform.subject import CHAT, Body, Subject

CASES = Cases("engine.md#why-nothing-changes-a-bit")
LONG = "The ship sailed on, and nobody on board knew where it would land. " * 4
NUM_AT_ONCE = 16


def _never_cached() -> str:
    """A long message that begins as no earlier one did: nothing of its answer comes from a cache."""
    return f"{secrets.token_hex(8)}. {LONG}"


def _bits(document: Found) -> Any:
    """Text, reason and every log-probability of an answer."""
    choice = document["choices"][0]
    return [choice["message"].value, choice["finish_reason"].value, choice["logprobs"].value]


def _body(server: Subject, number: int) -> Body:
    """One of several requests, no two alike; every other one draws."""
    fields = {"temperature": number % 2, "seed": number, "logprobs": True, "max_tokens": 24, "ignore_eos": True}
    return server.chat_body(f"Question {number}: {LONG[: 20 * number]}", **fields)


async def _one_by_one(server: Subject, bodies: Sequence[Body]) -> list[Any]:
    return [_bits((await server.post(CHAT, body)).has_status(200).document) for body in bodies]


async def _at_once(server: Subject, bodies: Sequence[Body]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def ask(index: int) -> None:
        answers[index] = await server.post(CHAT, bodies[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(bodies)):
            nursery.start_soon(ask, index)
    return [answers[index] for index in range(len(bodies))]


@CASES.add("exact.repeated", "an answer is the same bits each time, from a cached prefix too")
async def repeated(server: Subject) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 24}
    content = _never_cached()
    first = _bits(await server.chat(content, **fields))
    for _ in range(2):
        again = await server.chat(content, **fields)
        again.check(_bits(again) == first, "the bits of the first answer")


@CASES.add("exact.longer_prefix", "an answer does not depend on what shares its prefix")
async def longer_prefix(server: Subject) -> None:
    fields = {"logprobs": True, "max_tokens": 16}
    story = _never_cached()
    content = story + "Was it night?"
    first = _bits(await server.chat(content, **fields))
    for other in (story + "Was it day?", content + " Or was it?", story):
        await server.chat(other, **fields)
    again = await server.chat(content, **fields)
    again.check(_bits(again) == first, "the bits of the first answer")


@CASES.add("exact.mates", "an answer among 8 others is the same bits as alone", is_alone=True)
async def mates(server: Subject) -> None:
    bodies = [_body(server, number) for number in range(9)]
    alone = await _one_by_one(server, bodies[4:5])
    answer = (await _at_once(server, bodies))[4].has_status(200)
    answer.document.check(_bits(answer.document) == alone[0], "the bits of the answer alone")


@CASES.add("concurrency.16", "16 requests at once get the answers that they get one by one", is_alone=True)
async def sixteen(server: Subject) -> None:
    bodies = [_body(server, number) for number in range(NUM_AT_ONCE)]
    wanted = await _one_by_one(server, bodies)
    for answer, bits in zip(await _at_once(server, bodies), wanted, strict=True):
        answer.has_status(200).document.check(_bits(answer.document) == bits, "the bits of the answer alone")


@CASES.add(
    "concurrency.streams",
    "16 streams at once each end with [DONE], under ids of their own",
    level="core",
    is_alone=True,
)
async def streams(server: Subject) -> None:
    bodies = [server.chat_body(f"Name {number} things.", stream=True) for number in range(NUM_AT_ONCE)]
    ids = set()
    for answer in await _at_once(server, bodies):
        id = answer.events()[0]["id"]
        id.check(id.value not in ids, "an id that no other stream has")
        ids.add(id.text())
        if not answer.is_done:
            answer.fail("data: [DONE] at the end", repr(answer.body[-60:].decode("utf-8", "replace")))

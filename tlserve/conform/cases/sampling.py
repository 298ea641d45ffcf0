"""Every field that steers sampling has the effect that its name says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlserve.conform.case import Cases
from tlserve.conform.found import Found
from tlserve.conform.subject import Subject

CASES = Cases("api.md#generation")
DRAWN: Mapping[str, Any] = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}


def _text(document: Found) -> Found:
    return document["choices"][0]["message"]["content"]


@CASES.add("chat.seed", "the same seed gives the same answer", level="core")
async def seed(server: Subject) -> None:
    fields = {"temperature": 1, "max_tokens": 24, "seed": 7}
    first, second = await server.chat(**fields), await server.chat(**fields)
    _text(second).equals(_text(first).text())


@CASES.add("chat.seed.other", "another seed gives another answer")
async def seed_other(server: Subject) -> None:
    first = _text(await server.chat(**DRAWN, seed=7)).text()
    other = _text(await server.chat(**DRAWN, seed=8))
    other.check(other.text() != first, "another text than with seed 7")


@CASES.add("chat.seed.range", "a seed is any 64-bit signed integer")
async def seed_range(server: Subject) -> None:
    for value in (-(2**63), 2**63 - 1):
        await server.chat(**DRAWN, seed=value)


@CASES.add("chat.seed.absent", "without a seed answers differ")
async def seed_absent(server: Subject) -> None:
    texts = [_text(await server.chat(**DRAWN)) for _ in range(3)]
    texts[-1].check(len({text.text() for text in texts}) > 1, "a text of its own")


async def _is_greedy(server: Subject, **fields: object) -> None:
    wanted = _text(await server.chat(ignore_eos=True)).text()
    given = {"temperature": 2, "seed": 5, "ignore_eos": True} | fields
    _text(await server.chat(**given)).equals(wanted)


@CASES.add("chat.top_k", "top_k 1 is greedy; -1 and 0 are off")
async def top_k(server: Subject) -> None:
    await _is_greedy(server, top_k=1)
    off = _text(await server.chat(**DRAWN, seed=7)).text()
    for value in (-1, 0, 2**40):
        _text(await server.chat(**DRAWN, seed=7, top_k=value)).equals(off)


@CASES.add("chat.top_p", "a tiny top_p is greedy; 1 is off")
async def top_p(server: Subject) -> None:
    await _is_greedy(server, top_p=1e-6)
    off = _text(await server.chat(**DRAWN, seed=7)).text()
    _text(await server.chat(**DRAWN, seed=7, top_p=1)).equals(off)


@CASES.add("chat.min_p", "min_p 1 is greedy; 0 is off")
async def min_p(server: Subject) -> None:
    await _is_greedy(server, min_p=1)
    off = _text(await server.chat(**DRAWN, seed=7)).text()
    _text(await server.chat(**DRAWN, seed=7, min_p=0)).equals(off)


@CASES.add("chat.temperature", "temperature changes what is drawn")
async def temperature(server: Subject) -> None:
    greedy = _text(await server.chat(max_tokens=24, ignore_eos=True)).text()
    drawn = _text(await server.chat(**DRAWN, seed=7))
    drawn.check(drawn.text() != greedy, "another text than the greedy one")


@CASES.add("chat.logit_bias", "a bias of 100 makes a token certain, one of -100 keeps it out")
async def logit_bias(server: Subject) -> None:
    (letter,) = await server.tokens(text="a")
    forced = await server.chat(max_tokens=6, ignore_eos=True, logit_bias={str(letter): 100})
    _text(forced).equals("aaaaaa")
    greedy = _text(await server.chat(max_tokens=1, ignore_eos=True)).text()
    first, *_ = await server.tokens(text=greedy)
    banned = _text(await server.chat(max_tokens=1, ignore_eos=True, logit_bias={str(first): -100}))
    banned.check(banned.text() != greedy, f"another token than {greedy!r}")


async def _penalises_generated(server: Subject, name: str) -> None:
    """The first token has no generated ones before it; later ones have."""
    fields = {"ignore_eos": True, "max_tokens": 48}
    low = _text(await server.chat(**fields, **{name: -2})).text()
    high = _text(await server.chat(**fields, **{name: 2}))
    high.check(high.text() != low, f"another text than with {name} -2")
    plain = _text(await server.chat(max_tokens=1, ignore_eos=True)).text()
    _text(await server.chat(max_tokens=1, ignore_eos=True, **{name: 2})).equals(plain)


@CASES.add("chat.presence_penalty", "presence_penalty counts generated tokens, and only those")
async def presence_penalty(server: Subject) -> None:
    await _penalises_generated(server, "presence_penalty")


@CASES.add("chat.frequency_penalty", "frequency_penalty counts generated tokens, and only those")
async def frequency_penalty(server: Subject) -> None:
    await _penalises_generated(server, "frequency_penalty")


@CASES.add("chat.repetition_penalty", "repetition_penalty changes the answer; 1 is off")
async def repetition_penalty(server: Subject) -> None:
    fields = {"ignore_eos": True, "max_tokens": 48}
    plain = _text(await server.chat(**fields)).text()
    _text(await server.chat(**fields, repetition_penalty=1)).equals(plain)
    strong = _text(await server.chat(**fields, repetition_penalty=5))
    strong.check(strong.text() != plain, "another text than without")

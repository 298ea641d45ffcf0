"""Clients of every kind, so that every panel has something to show: more and more of them, then fewer."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from tests.client import Address, connect, get, post

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
NUM_STREAMS = 10  # at the height of it
SYSTEM = "You answer in one short sentence, in plain words, and never repeat the question. " * 4
QUESTIONS = ("What is a lake?", "Name three colours.", "Why is the sky blue?", "Count from one to twenty.")
BURST = 24  # more than run and wait together


@dataclass
class Load:
    api: Address
    model: str
    seconds: float
    began: float = field(default_factory=trio.current_time)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self) -> None:
        """Return when the time is over and the last client has its answer."""
        async with trio.open_nursery() as nursery:
            for number in range(NUM_STREAMS):
                nursery.start_soon(self._stream_forever, number)
            for client, rest in (
                (self.embed, 2.0),
                (self.ask_whole, 1.5),
                (self.leave_early, 3.0),
                (self.make_a_mistake, 1.0),
                (self.look_around, 1.0),
                (self.come_in_a_crowd, self.seconds / 4),
            ):
                nursery.start_soon(self._repeat, client, rest)

    @property
    def is_over(self) -> bool:
        return trio.current_time() > self.began + self.seconds

    async def _repeat(self, client: Callable[[], Awaitable[None]], rest: float) -> None:
        await trio.sleep(rest)
        while not self.is_over:
            await client()
            await trio.sleep(rest * self.draw.uniform(0.5, 1.5))

    async def _stream_forever(self, number: int) -> None:
        """From when the curve of the load rises over this client until it falls below it."""
        edge = math.asin((number + 0.5) / NUM_STREAMS) / math.pi
        await trio.sleep(edge * self.seconds)
        while trio.current_time() < self.began + (1 - edge) * self.seconds:
            await self.stream()
            await trio.sleep(self.draw.uniform(0, 0.5))

    async def stream(self) -> None:
        async with connect(self.api) as client:
            await client.start("POST", CHAT, self._chat(stream=True))
            async for _ in client.chunks():
                pass

    async def embed(self) -> None:
        await post(self.api, EMBEDDINGS, {"model": self.model, "input": list(QUESTIONS)})

    async def ask_whole(self) -> None:
        prompts = self.draw.sample(QUESTIONS, 2)
        await post(self.api, COMPLETIONS, {"model": self.model, "prompt": prompts, "max_tokens": 24, "stop": "."})

    async def leave_early(self) -> None:
        async with connect(self.api) as client:
            await client.start("POST", CHAT, self._chat(stream=True))
            await trio.sleep(self.draw.uniform(0, 0.5))

    async def make_a_mistake(self) -> None:
        body, path = self.draw.choice(
            [
                ({"model": "another"}, CHAT),
                (self._chat(temperature=3), CHAT),
                (self._chat(n=1, messages=[]), CHAT),
                ({"model": self.model, "prompt": "a", "suffix": "b"}, COMPLETIONS),
                ({}, "/v1/nowhere"),
            ]
        )
        await post(self.api, path, body)

    async def look_around(self) -> None:
        await get(self.api, "/v1/models")
        await post(self.api, "/v1/tokenize", {"model": self.model, "text": "How many tokens is this?"})

    async def come_in_a_crowd(self) -> None:
        """Some find the queue full, and some wait in it for longer than they may: 429 and 503."""
        body = self._chat(max_tokens=200, ignore_eos=True)
        async with trio.open_nursery() as nursery:
            for _ in range(BURST):
                nursery.start_soon(partial(post, self.api, CHAT, body))

    def _chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.draw.choice(QUESTIONS)}]
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.draw.randint(8, 96),
            "seed": self.draw.randint(0, 1000),
        } | fields

"""The measurements of ``trio-tlserve bench``: what llama-bench and llama-batched-bench measure, on our engine."""

# The engine has no way to compute a prompt and draw nothing, or to start in the middle of a text. Both come from
# its prefix cache: a request of one token that has left its prompt behind is the cheapest way to be at a depth, and
# requests that begin with that prompt compute only what follows it.

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlserve.engine.engine import Engine
from tlserve.engine.request import GenRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Single:
    """One stream: ``num_prompt`` tokens are read, or ``num_generated`` drawn, after ``depth`` tokens."""

    num_prompt: int
    num_generated: int
    depth: int = 0

    @property
    def name(self) -> str:
        """pp512, tg128, tg128 @ d4096."""
        kind = f"pp{self.num_prompt}" if self.num_prompt else f"tg{self.num_generated}"
        return f"{kind} @ d{self.depth}" if self.depth else kind

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_generated

    @property
    def num_positions(self) -> int:
        """Places of the KV cache that it takes: the prefix, what follows, and the token that starts a generation."""
        return self.depth + self.num_tokens + 1


@dataclass(frozen=True, slots=True)
class Batched:
    """``num_streams`` prompts are read, then all are continued together."""

    num_streams: int
    num_prompt: int
    num_generated: int

    @property
    def num_positions(self) -> int:
        return self.num_streams * (self.num_prompt + self.num_generated + 1)


class Bench:
    """Runs tests on an engine that has nothing else to do and a radix cache. Random tokens, the same for a seed."""

    def __init__(self, engine: Engine, vocab_size: int, *, seed: int = 0) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def single(self, test: Single) -> float:
        """Seconds of one repetition."""
        prefix = self._tokens(test.depth)
        if prefix:
            self._run([prefix], 1)
        if test.num_prompt:
            return self._run([prefix + self._tokens(test.num_prompt)], 1)
        return self._run([prefix + self._tokens(1)], test.num_generated)

    def batched(self, test: Batched) -> tuple[float, float]:
        """Seconds for all prompts, and for all that follows them."""
        prompts = [self._tokens(test.num_prompt) for _ in range(test.num_streams)]
        return self._run(prompts, 1), self._run([prompt + self._tokens(1) for prompt in prompts], test.num_generated)

    def _tokens(self, count: int) -> Tokens:
        return tuple(self._random.integers(self._vocab_size, size=count).tolist())

    def _run(self, prompts: Sequence[Tokens], max_tokens: int) -> float:
        for prompt in prompts:
            self._engine.add_request(GenRequest(prompt=prompt, max_tokens=max_tokens, params=GREEDY))
        start = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return time.perf_counter() - start

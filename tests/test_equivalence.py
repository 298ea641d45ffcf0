"""No feature of the engine changes one bit of any answer: on real models, with the real kernels.

The reference is a loop that computes the whole sequence again for every token, in blocks of its own, and draws from
the last row alone. Each test runs requests over every chunk size, with few and many mates, in a pool that is roomy or
forces preemption, on one thread or two.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from tlserve.config import EngineConfig, SpeculativeConfig
from tlserve.engine.engine import Engine
from tlserve.engine.request import GenRequest, RequestId, SamplingParams, TokenOut
from tlserve.engine.sampler import LogitsRow, Sampler
from tlserve.engine.state import RequestState
from tlserve.kernels.sampling import sample
from tlserve.model.batch import Batch
from tlserve.model.checkpoint import open_checkpoint
from tlserve.model.runner import Runner, load_runner

FIXTURES = Path(__file__).parents[1] / "fixtures"
NUM_TOKENS = 257
LONGEST = 128  # tokens of prompt and answer
TIGHT = LONGEST // 16 + 1  # blocks: one more than the longest request
ROOMY = 200
SAMPLING = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=0),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, num_logprobs=0
    ),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, logit_bias=((3, 1.5), (9, -100.0)), num_logprobs=0),
)
SPECULATION = {
    "off": None,
    "prompt_lookup": SpeculativeConfig(method="prompt_lookup", num_tokens=4, ngram_min=1),
    "draft_model": SpeculativeConfig(method="draft_model", num_tokens=3, draft_model_dir=FIXTURES / "tiny-llama-bias"),
}
CHUNKS, MATES, POOLS, THREADS = (0, 1, 7, 16, 64), (1, 3, 8, 17), (TIGHT, ROOMY), (1, 2)
# prefill_chunk, mates, blocks, threads. With EQUIVALENCE=full the whole product (`make equivalence`), else every chunk
# with every number of mates and the others in turn.
RUNS = (
    list(product(CHUNKS, MATES, POOLS, THREADS))
    if os.environ.get("EQUIVALENCE") == "full"
    else [
        (prefill_chunk, num_mates, POOLS[(i + j) % 2], THREADS[(i + j // 2) % 2])
        for i, prefill_chunk in enumerate(CHUNKS)
        for j, num_mates in enumerate(MATES)
    ]
)

Answer = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]
PrefixCache = Literal["off", "hash", "radix"]


class Models:
    """The runners of one fixture, made when first asked for; a runner's blocks are full of what came before."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._runners: dict[tuple[str, int, int], Runner] = {}
        self._answers: dict[GenRequest, Answer] = {}

    def runner(self, num_blocks: int, threads: int, *, name: str | None = None) -> Runner:
        key = (name or self._name, num_blocks, threads)
        if key not in self._runners:
            config = EngineConfig(
                num_blocks=num_blocks,
                threads=threads,
                max_model_len=LONGEST,
                kv_dtype="f32",
                speculative=SPECULATION["prompt_lookup"],  # room for the rows of drafts
            )
            self._runners[key] = load_runner(open_checkpoint(FIXTURES / key[0]), config)
        return self._runners[key]

    def answer(self, request: GenRequest) -> Answer:
        if request not in self._answers:
            self._answers[request] = reference(self.runner(ROOMY, 1), request)
        return self._answers[request]

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    made = Models(request.param)
    yield made
    made.close()


def reference(runner: Runner, request: GenRequest) -> Answer:
    """The request alone, every token from nothing."""
    state = RequestState.new(RequestId(0), request)
    state.slot = 0
    sampler = Sampler(1, sample)
    answer: Answer = []
    for _ in range(request.max_tokens):
        count = state.num_tokens
        batch = Batch(
            token_ids=state.tokens[:count],
            positions=np.arange(count, dtype=np.int32),
            request_rows=np.zeros(count, np.int32),
            block_tables=np.arange(LONGEST // 16, dtype=np.int32)[np.newaxis],
            logits_rows=np.array([count - 1], np.int32),
            hidden_rows=np.zeros(0, np.int32),
        )
        drawn = sampler.sample(runner.forward(batch).logits, [LogitsRow(state, 0)])
        num_top = request.params.num_logprobs or 0
        top = zip(drawn.top_ids[0, :num_top].tolist(), drawn.top_logprobs[0, :num_top].tolist(), strict=True)
        answer.append((int(drawn.tokens[0]), float(drawn.logprobs[0]), tuple(top)))
        if state.append(int(drawn.tokens[0])) is not None:
            break
    return answer


def requests(count: int, seed: int) -> list[GenRequest]:
    """Prompts that share beginnings and repeat themselves, so that caches hit and guesses are right."""
    rng = random.Random(seed)
    shared = random.Random(0).choices(range(NUM_TOKENS), k=70)
    made = []
    for index in range(count):
        own = rng.choices(range(NUM_TOKENS), k=rng.randrange(1, 12))
        prompt = rng.choice([shared[: rng.choice([20, 48, 70])] + own, own, own, own * 4, shared[:64]])
        made.append(
            GenRequest(
                tuple(prompt),
                rng.randrange(1, 32),
                SAMPLING[index % len(SAMPLING)],
                seed=index,
                stop_ids=frozenset(range(0, NUM_TOKENS, 16)) if index % 4 == 0 else frozenset(),
                min_tokens=index % 3,
                priority=rng.choice([0, 0, 7]),
            )
        )
    return made


@dataclass
class Arrivals:
    """Adds requests to an engine while it runs, and gathers what each has brought."""

    engine: Engine
    rng: random.Random

    def __post_init__(self) -> None:
        self.requests: dict[RequestId, GenRequest] = {}
        self.answers: dict[RequestId, Answer] = {}

    def step(self) -> None:
        for output in self.engine.step():
            assert isinstance(output, TokenOut)
            self.answers[output.id].append((output.token, output.logprob, output.top_logprobs))

    def run(self, arriving: list[GenRequest]) -> None:
        for request in arriving:
            request_id = self.engine.add_request(request)
            self.requests[request_id], self.answers[request_id] = request, []
            for _ in range(self.rng.randrange(3)):
                self.step()
        self.engine.check_invariants()
        while self.engine.has_work():
            self.step()
        self.engine.check_invariants()


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("prefix_cache", ["off", "hash", "radix"])
def test_every_answer_is_the_reference_answer(models: Models, prefix_cache: PrefixCache, speculation: str) -> None:
    num_preemptions = 0
    for prefill_chunk, num_mates, num_blocks, threads in RUNS:
        config = EngineConfig(
            prefix_cache=prefix_cache,
            prefill_chunk=prefill_chunk,
            max_num_seqs=num_mates,
            speculative=SPECULATION[speculation],
        )
        draft = models.runner(num_blocks, 1, name="tiny-llama-bias") if speculation == "draft_model" else None
        engine = Engine(models.runner(num_blocks, threads), config, max_waiting=64, draft_model=draft)
        arrivals = Arrivals(engine, random.Random(num_mates))
        arriving = requests(num_mates + 2, num_mates)
        arrivals.run(arriving)  # cold, arriving and leaving
        for request in arriving[:2]:  # warm, alone
            arrivals.run([request])
        for request_id, request in arrivals.requests.items():
            assert arrivals.answers[request_id] == models.answer(request), (prefill_chunk, num_mates, request)
        num_preemptions += engine.stats().num_preemptions
        assert engine.stats().num_blocks_used == 0
    assert num_preemptions > 0

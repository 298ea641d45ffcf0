"""No feature of the engine changes one bit of any answer.

Every request gives, to the bit, the tokens and log probabilities of the reference: a model without blocks, one row
at a time. The model's logits are a hash of all that its block tables lead to, so nothing wrong in them stays hidden.
"""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from tests.engine.harness import Driver, PrefixCache, draft_model, prompt_lookup
from tests.engine.reference_sampler import Drawn, generate
from tests.fakes import ScriptedModel
from tlserve.engine.request import GenRequest, SamplingParams

SAMPLING = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=0),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, logit_bias=((3, 1.5), (9, -100.0))),
    SamplingParams(temperature=1.3, top_k=5, min_p=0.05, num_logprobs=3),
)
LONGEST = 64  # tokens of prompt and answer
SPECULATION = {"off": None, "prompt_lookup": prompt_lookup(4), "draft_model": draft_model(3)}


def requests(rng: random.Random, count: int) -> list[GenRequest]:
    """Requests of which most share a beginning with another one, and many repeat themselves."""
    shared = [rng.randrange(16) for _ in range(40)]
    made = []
    for index in range(count):
        own = [rng.randrange(16) for _ in range(rng.randrange(1, 8))]
        prompt = rng.choice([shared[: rng.randrange(41)] + own, shared[:24], own * 3])
        made.append(
            GenRequest(
                tuple(prompt),
                rng.randrange(1, min(24, LONGEST - len(prompt)) + 1),
                SAMPLING[index % len(SAMPLING)],
                seed=index * 1_000_003,
                stop_ids=frozenset({11}) if index % 4 == 0 else frozenset(),
                min_tokens=index % 3,
                priority=rng.choice([0, 0, 0, 7]),
            )
        )
    return made


@functools.cache
def reference(habit: float, request: GenRequest) -> tuple[Drawn, ...]:
    return tuple(generate(ScriptedModel(habit=habit), request))


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("prefill_chunk", [0, 1, 7, 16, 64])
@pytest.mark.parametrize("prefix_cache", ["off", "hash", "radix"])
def test_every_answer_is_the_reference_answer(prefix_cache: PrefixCache, prefill_chunk: int, speculation: str) -> None:
    num_preemptions = 0
    for num_mates, num_blocks in itertools.product((1, 3, 8, 17), (LONGEST // 4 + 1, 200)):
        rng = random.Random(f"{num_mates} {num_blocks} {prefill_chunk}")
        habit = rng.choice([0.0, 4.0, 7.0])
        driver = Driver(
            ScriptedModel(num_blocks=num_blocks, habit=habit),
            prefix_cache=prefix_cache,
            prefill_chunk=prefill_chunk,
            max_num_seqs=num_mates,
            speculative=SPECULATION[speculation],
            draft=ScriptedModel(num_blocks=num_blocks, habit=5.0, salt=1) if speculation == "draft_model" else None,
        )
        for request in requests(rng, num_mates + 2):  # arriving and leaving, cold; some find what others left
            driver.add(request)
            for _ in range(rng.randrange(3)):
                driver.step()
        driver.run()
        for request in list(driver.requests.values())[:3]:  # warm, alone
            driver.finish(request)
        for request_id, request in driver.requests.items():
            assert tuple(driver.drawn[request_id]) == reference(habit, request), request
        num_preemptions += driver.engine.stats().num_preemptions
        assert driver.engine.stats().num_blocks_used == 0
    assert num_preemptions > 0

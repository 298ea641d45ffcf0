"""Invariant: adding, stepping, aborting, evicting and draining, in any order, give each request the tokens of the
reference, and leave the books of blocks, requests and counters in agreement after every one of them.

The pools are so small that everything happens. The plain model beside the engine is a table: what the reference gives
for each request that has not ended.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine import reference_sampler
from tests.engine.harness import Driver, PrefixCache, draft_model, prompt_lookup
from tests.engine.reference_sampler import Drawn
from tests.fakes import ScriptedModel
from tests.profiles import examples
from tlserve.engine.request import GenRequest, PooledOut, RequestId, SamplingParams

BLOCK_SIZE = 4
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, frequency_penalty=0.7, num_logprobs=1),
    SamplingParams(temperature=0.9, top_k=4, repetition_penalty=1.2),
)
# Few tokens and few shapes: prompts must share beginnings and end at block borders often.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 12),
        prefix_cache=st.sampled_from(["off", "hash", "radix"]),
        prefill_chunk=st.sampled_from([0, 1, 3, 4, 7]),
        max_num_seqs=st.integers(1, 5),
        max_batch_tokens=st.sampled_from([1, 2, 5, 9, 64]),
        speculation=st.sampled_from(["off", "prompt_lookup", "draft_model"]),
    )
    def start(
        self,
        num_blocks: int,
        prefix_cache: PrefixCache,
        prefill_chunk: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        speculation: str,
    ) -> None:
        self.driver = Driver(
            ScriptedModel(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=4, habit=4.0),
            prefix_cache=prefix_cache,
            prefill_chunk=prefill_chunk,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_waiting=6,
            speculative={"off": None, "prompt_lookup": prompt_lookup(3), "draft_model": draft_model(3)}[speculation],
            draft=ScriptedModel(num_blocks=num_blocks, vocab_size=4, habit=4.0, salt=1)
            if speculation == "draft_model"
            else None,
        )
        self.longest = (num_blocks - 1) * BLOCK_SIZE
        self.expected: dict[RequestId, list[Drawn]] = {}  # of those that are not aborted
        self.counters = (0,) * 6

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        params=st.sampled_from(PARAMS),
        seed=st.integers(-3, 3),
        stop_ids=st.sampled_from([frozenset[int](), frozenset({3})]),
        priority=st.integers(-1, 1),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int],
        priority: int,
    ) -> None:
        if len(self.expected) >= self.driver.engine.max_requests:
            return
        max_tokens = min(max_tokens, self.longest - len(prompt))
        request = GenRequest(prompt, max_tokens, params, seed=seed, stop_ids=stop_ids, priority=priority)
        request_id = self.driver.add(request)
        self.expected[request_id] = reference_sampler.generate(self.driver.model, request)

    @rule(prompt=PROMPTS)
    def add_pooling(self, prompt: tuple[int, ...]) -> None:
        if len(self.expected) < self.driver.engine.max_requests:
            self.expected[self.driver.add(GenRequest(prompt, 0, is_pooling=True))] = []

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.driver.engine.abort(request_id)
        self.driver.engine.check_invariants()
        del self.expected[request_id]

    @rule()
    def evict(self) -> None:
        """One request as long as the pool takes every block that nobody holds."""
        if self.driver.engine.has_work():
            return
        request = GenRequest((3,) * (self.longest - 1), 1, PARAMS[0])
        self.expected[self.driver.add(request)] = reference_sampler.generate(self.driver.model, request)
        self.drain()

    @rule()
    def drain(self) -> None:
        """Everything ends, and soon: the pool holds the longest request."""
        for _ in range(2000):
            if not self.driver.engine.has_work():
                break
            self._step()
        assert not self.expected
        assert self.driver.engine.stats().num_blocks_used == 0

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "driver"):
            return
        stats = self.driver.engine.stats()
        total = stats.num_blocks_free + stats.num_blocks_used + stats.num_blocks_cached
        assert total == self.driver.model.num_blocks
        assert stats.num_waiting + stats.num_running == len(self.expected)
        assert bool(self.expected) == self.driver.engine.has_work()
        counters = (
            stats.prefix_tokens_asked,
            stats.prefix_tokens_hit,
            stats.num_preemptions,
            stats.num_kv_evictions,
            stats.spec_tokens_drafted,
            stats.spec_tokens_accepted,
        )
        assert all(now >= before for now, before in zip(counters, self.counters, strict=True))
        assert stats.spec_tokens_accepted <= stats.spec_tokens_drafted
        self.counters = counters

    def _step(self) -> None:
        for output in self.driver.step():
            expected = self.expected[output.id]
            if output.finish is not None:
                del self.expected[output.id]
            if isinstance(output, PooledOut):
                continue
            drawn = self.driver.drawn[output.id]
            assert drawn == (expected if output.finish is not None else expected[: len(drawn)])
            self._check_hit(self.driver.requests[output.id].prompt, output.num_cached_tokens)

    def _check_hit(self, prompt: tuple[int, ...], num_cached: int) -> None:
        """What is said to come from the cache has been computed, for these very tokens."""
        assert num_cached < len(prompt)
        assert num_cached == 0 or self.driver.model.has_computed(prompt[:num_cached])


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=examples(25, cost=10),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

"""Faults that users reported of other servers, by the id of the report, as far as an engine alone can have them."""

from __future__ import annotations

import dataclasses
import random

import pytest
import trio
import trio.testing

from tests.engine.harness import GREEDY, Driver, PrefixCache, draft_model, greedy, prompt_lookup
from tests.engine.reference_sampler import generate
from tests.engine.test_loop import finish, new_loop, running, tokens_of
from tests.fakes import ScriptedModel
from tlserve.engine.request import FinishReason, GenRequest, SamplingParams
from tlserve.errors import ContextLengthExceeded, InvalidRequest, Overloaded

BLOCK = 4
CHUNK = 8
COUNT_UP = {token: (token + 1) % 16 for token in range(16)}
CACHES = pytest.mark.parametrize("prefix_cache", ["off", "hash", "radix"])
SPECULATION = pytest.mark.parametrize("speculation", ["off", "prompt_lookup", "draft_model"])


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(16), k=length)


def speculating(speculation: str, model: ScriptedModel, *, num_tokens: int = 4) -> Driver:
    config = {"off": None, "prompt_lookup": prompt_lookup(num_tokens), "draft_model": draft_model(num_tokens)}
    twin = ScriptedModel(script=model.script) if speculation == "draft_model" else None
    return Driver(model, prefix_cache="radix", speculative=config[speculation], draft=twin)


@SPECULATION
@pytest.mark.parametrize(("stop_at", "length", "reason"), [(2, 3, "stop"), (3, 4, "stop"), (4, 4, "length")])
def test_b001_a_stop_and_the_cap_in_one_accepted_run(speculation: str, stop_at: int, length: int, reason: str) -> None:
    driver = speculating(speculation, ScriptedModel(script=COUNT_UP), num_tokens=8)
    request_id = driver.add(greedy([*range(16), 0], 4, stop_ids=frozenset({1 + stop_at})))
    driver.run()
    drawn = driver.drawn[request_id]
    assert [token.token for token in drawn] == list(range(1, length + 1))
    assert [token.finish for token in drawn] == [None] * (length - 1) + [FinishReason(reason)]


@CACHES
def test_b004_a_request_aborted_in_prefill_publishes_nothing_wrong(prefix_cache: PrefixCache) -> None:
    for num_steps in range(7):
        driver = Driver(ScriptedModel(), prefix_cache=prefix_cache, prefill_chunk=CHUNK)
        request = greedy(text(6 * CHUNK), 9)
        aborted = driver.add(request)
        for _ in range(num_steps):
            driver.step()
        driver.engine.abort(aborted)
        stats = driver.engine.stats()
        assert stats.num_blocks_free + stats.num_blocks_cached == driver.model.num_blocks
        assert stats.num_blocks_cached <= num_steps * CHUNK // BLOCK
        driver.finish(request)
        driver.check_outputs()


@CACHES
@pytest.mark.parametrize("length", [k * BLOCK + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)])
def test_b005_a_prompt_that_is_cached_whole(prefix_cache: PrefixCache, length: int) -> None:
    driver = Driver(ScriptedModel(), prefix_cache=prefix_cache)
    for max_tokens in (1, 1, 1, 20, 20, 20):
        driver.finish(greedy(text(length), max_tokens))
    driver.check_outputs()
    assert max(driver.cached.values()) <= length - 1
    assert all(len(batch.token_ids) for batch in driver.model.batches)
    stats = driver.engine.stats()
    assert stats.prefix_tokens_hit == sum(driver.cached.values())
    assert stats.prefix_tokens_asked == 6 * length


def test_b006_the_chunks_of_a_prompt_are_counted_after_its_cached_prefix() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="radix", prefill_chunk=CHUNK)
    first = text(2 * CHUNK)
    driver.finish(greedy(first, 1))
    num_steps = driver.num_steps
    driver.finish(greedy([*first, 1, 2, 3], 1))
    assert driver.num_steps == num_steps + 1
    driver.check_outputs()


def test_b010_penalties_remember_output_from_before_a_preemption() -> None:
    driver = Driver(ScriptedModel(num_blocks=10, habit=6.0))
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    for token in range(3):
        driver.add(GenRequest((token,) * 6, 24, params))
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    driver.check_outputs()


async def test_b011_a_request_whose_client_has_left_runs_no_more(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel()
    async with running(new_loop(model)) as loop:
        with trio.move_on_after(3.5):
            await finish(loop, greedy([1, 2], 100))
        num_batches = len(model.batches)
        await trio.sleep(10)
        assert len(model.batches) == num_batches
        assert (loop.stats().num_running, loop.stats().num_blocks_used) == (0, 0)


async def test_b012_a_client_that_leaves_during_prefill_stops_it(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel()
    async with running(new_loop(model)) as loop:
        with trio.move_on_after(1.5):
            await finish(loop, greedy(text(100), 1))
        await trio.sleep(10)
        assert len(model.batches) == 2  # of 25 chunks
        assert loop.stats().num_blocks_used == 0


@SPECULATION
@pytest.mark.parametrize("place", [3, 4, 5, 6])
def test_b024_eos_inside_an_accepted_run_ends_the_request(speculation: str, place: int) -> None:
    driver = speculating(speculation, ScriptedModel(script=COUNT_UP))
    tokens = driver.finish(greedy([*range(16), 0], 30, stop_ids=frozenset({1 + place})))
    assert tokens == list(range(1, place + 2))


@SPECULATION
def test_b025_seeded_output_does_not_depend_on_discarded_guesses(speculation: str) -> None:
    driver = speculating(speculation, ScriptedModel(habit=3.0))
    request = GenRequest(tuple(text(9)), 40, SamplingParams(temperature=1.0), seed=7, stop_ids=frozenset({13}))
    answers = [driver.finish(request)]
    ids = [driver.add(request), driver.add(greedy(text(5, 1), 30)), driver.add(request)]
    driver.run()
    answers += [driver.tokens(ids[0]), driver.tokens(ids[2])]
    assert answers == [[token.token for token in generate(driver.model, request)]] * 3


@CACHES
def test_b026_log_probabilities_after_a_hit_are_those_of_a_cold_request(prefix_cache: PrefixCache) -> None:
    driver = Driver(ScriptedModel(), prefix_cache=prefix_cache)
    params = SamplingParams(temperature=0.0, num_logprobs=2)
    for prompt in [text(3 * BLOCK + 5)] * 3 + [[*text(3 * BLOCK + 5), 1, 2, 3]]:
        driver.finish(GenRequest(tuple(prompt), 5, params))
    driver.check_outputs()


async def test_b028_a_burst_does_not_overshoot_the_caps(autojump_clock: trio.testing.MockClock) -> None:
    running_cap, queue = 3, 4
    loop = new_loop(max_num_seqs=running_cap, max_waiting=queue)
    results: list[object] = []

    async def client() -> None:
        try:
            results.append(await finish(loop, greedy([1], 2)))
        except Overloaded:
            results.append(trio.current_time())

    async with running(loop):
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(5 * (running_cap + queue)):
                nursery.start_soon(client)
    assert results.count(begin) == 4 * (running_cap + queue)
    assert results.count([2, 3]) == running_cap + queue


async def test_b029_a_list_of_prompts_counts_as_many(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_num_seqs=1, max_waiting=3)
    async with running(loop):
        async with loop.submit([greedy([1], 9)] * 2):
            before = loop.num_in_flight
            with pytest.raises(Overloaded):
                async with loop.submit([greedy([2], 2)] * 3):
                    raise AssertionError("not reached")
            assert loop.num_in_flight == before
        await loop.wait_idle()
        with pytest.raises(InvalidRequest, match="at most 4 prompts"):
            async with loop.submit([greedy([2], 2)] * 5):
                raise AssertionError("not reached")


@CACHES
def test_b042_two_who_compute_the_same_prefix_do_not_free_it_under_each_other(prefix_cache: PrefixCache) -> None:
    driver = Driver(ScriptedModel(), prefix_cache=prefix_cache, max_num_seqs=4, prefill_chunk=CHUNK)
    for priority in range(4):  # each more urgent than the last, so that none waits for what another is reading
        driver.add(greedy(text(5 * BLOCK), 40, priority=priority))
        driver.step()
    for seed in range(1, 5):
        driver.add(greedy(text(5 * BLOCK, seed), 40))
    driver.run()
    driver.check_outputs()


@CACHES
def test_b045_greedy_answers_do_not_depend_on_what_else_happened(prefix_cache: PrefixCache) -> None:
    driver = Driver(ScriptedModel(), prefix_cache=prefix_cache, prefill_chunk=CHUNK)
    prompts = [text(5 + seed, seed % 3) for seed in range(20)]
    for prompt in prompts:
        driver.finish(greedy(prompt, 8))  # cold, alone
    for prompt in prompts:
        driver.add(greedy(prompt, 8))  # warm, with mates
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_b046_the_last_chunk_of_a_prompt_that_ends_at_a_block(length: int) -> None:
    alone = Driver(ScriptedModel(), prefill_chunk=CHUNK)
    alone.finish(greedy(text(length), 6))
    alone.check_outputs()
    mixed = Driver(ScriptedModel(), prefill_chunk=CHUNK)
    for seed in (1, 2, 3):
        mixed.add(greedy(text(3, seed), 20))
    mixed.step()
    mixed.finish(greedy(text(length), 6))
    mixed.check_outputs()


def test_b047_only_the_last_chunk_draws_a_token() -> None:
    driver = Driver(ScriptedModel(), prefill_chunk=CHUNK)
    request_id = driver.add(greedy(text(3 * CHUNK + 1), 1))
    driver.run()
    assert [len(batch.logits_rows) for batch in driver.model.batches] == [0, 0, 0, 1]
    assert [token.finish for token in driver.drawn[request_id]] == [FinishReason.LENGTH]
    driver.check_outputs()


def test_b048_later_chunks_have_their_own_tokens_and_positions() -> None:
    driver = Driver(ScriptedModel(), prefill_chunk=CHUNK)
    prompt = text(4 * CHUNK)
    driver.finish(greedy(prompt, 1))
    assert [token for batch in driver.model.batches for token in batch.token_ids.tolist()] == prompt
    assert [place for batch in driver.model.batches for place in batch.positions.tolist()] == list(range(4 * CHUNK))


def test_b049_chunks_make_progress_without_a_cache() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="off", prefill_chunk=CHUNK)
    driver.finish(greedy(text(5 * CHUNK), 2))
    assert driver.num_steps == 6
    assert driver.engine.stats().num_blocks_free == driver.model.num_blocks


@pytest.mark.parametrize("prompt", [[5] * 48, [1, 2, 3, 4] * 10, [*range(16)] * 3])
def test_b050_guesses_from_a_repetitive_prompt_change_nothing(prompt: list[int]) -> None:
    for habit in (0.0, 5.0, 8.0):
        driver = Driver(ScriptedModel(habit=habit), speculative=prompt_lookup(8))
        driver.finish(greedy(prompt, 32))
        assert driver.engine.stats().spec_tokens_drafted > 0
        driver.check_outputs()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_b053_a_draft_ends_with_max_tokens_and_the_context(max_tokens: int) -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP, max_model_len=36), speculative=prompt_lookup(8))
    assert len(driver.finish(greedy([*range(16), 0], max_tokens))) == max_tokens
    at_the_end = [*range(16), *range(16), 0, 1]
    assert len(driver.finish(greedy(at_the_end, 2))) == 2
    assert max(int(batch.positions.max()) for batch in driver.model.batches) < 36


def test_b081_a_prompt_as_long_as_the_context() -> None:
    longest = 40
    driver = Driver(ScriptedModel(max_model_len=longest), prefix_cache="radix")
    request_id = driver.add(greedy(text(longest - 1), 1))
    driver.run()
    assert [token.finish for token in driver.drawn[request_id]] == [FinishReason.LENGTH]
    for length in (longest, longest + 1, 10 * longest):
        with pytest.raises(ContextLengthExceeded, match=rf"40 tokens; .* {length} tokens"):
            driver.add(greedy(text(length), 1))


def test_b102_the_number_of_log_probabilities_is_what_was_asked_for() -> None:
    driver = Driver(ScriptedModel())
    ids = {
        count: driver.add(GenRequest((1, 2), 3, dataclasses.replace(GREEDY, num_logprobs=count)))
        for count in (None, 0, 1, 5, 20)
    }
    driver.run()
    driver.check_outputs()
    for count, request_id in ids.items():
        for token in driver.drawn[request_id]:
            assert (token.logprob is None) == (count is None)
            assert len(token.top_logprobs) == min(count or 0, 16)
            assert not token.top_logprobs or token.top_logprobs[0] == (token.token, token.logprob)


def test_b105_only_the_repetition_penalty_counts_the_prompt() -> None:
    model = ScriptedModel()
    prompt = (3,) * 20
    plain = generate(model, GenRequest(prompt, 1, GREEDY))[0].token
    for params in (
        dataclasses.replace(GREEDY, presence_penalty=2.0),
        dataclasses.replace(GREEDY, frequency_penalty=2.0),
    ):
        assert Driver(model).finish(GenRequest((*prompt, plain), 1, params)) == Driver(model).finish(
            GenRequest((*prompt, plain), 1, GREEDY)
        )
    everything = tuple(range(16))
    likeliest = Driver(model).finish(GenRequest(everything[:-1], 1, GREEDY))
    params = dataclasses.replace(GREEDY, repetition_penalty=1000.0)
    assert Driver(model).finish(GenRequest(everything[:-1], 1, params)) == [15] != likeliest


def test_b107_seeds_differ_and_equal_seeds_repeat() -> None:
    driver = Driver(ScriptedModel())
    params = SamplingParams(temperature=1.5)
    ids = [driver.add(GenRequest((1, 2), 12, params, seed=seed)) for seed in (0, 1, 2, -1, 2**63 - 1, -(2**63), 0)]
    driver.run()
    answers = [tuple(driver.tokens(request_id)) for request_id in ids]
    assert len(set(answers)) == 6
    assert answers[0] == answers[6]


async def test_b108_every_client_of_a_flood_is_answered(autojump_clock: trio.testing.MockClock) -> None:
    loop = new_loop(max_num_seqs=2, max_waiting=3, queue_deadline=20)
    rng = random.Random(1)
    num_answered = 0

    async def client(patience: float) -> None:
        nonlocal num_answered
        with trio.move_on_after(patience):
            try:
                await finish(loop, greedy([1, 2], 4))
            except Overloaded:
                num_answered += 1
                return
        num_answered += 1

    async with running(loop):
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(client, rng.choice([0.5, 3.0, 1000.0]))
        await loop.wait_idle()
        stats = loop.stats()
        assert num_answered == 1000
        assert (stats.num_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert await finish(loop, greedy([1], 2)) == [2, 3]


async def test_b110_a_stream_that_is_closed_does_not_hurt_the_others(autojump_clock: trio.testing.MockClock) -> None:
    model = ScriptedModel()
    answers: list[list[int]] = []

    async with running(new_loop(model)) as loop, trio.open_nursery() as nursery:

        async def client(request: GenRequest) -> None:
            answers.append(await finish(loop, request))

        requests = [greedy(text(9, seed), 12) for seed in range(3)]
        nursery.start_soon(client, requests[0])
        nursery.start_soon(client, requests[1])
        async with loop.submit([greedy(text(9, 8), 30)]) as generation:
            await anext(generation)
        nursery.start_soon(client, requests[2])
    expected = [[token.token for token in generate(model, request)] for request in requests]
    assert sorted(answers) == sorted(expected)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_b125_the_counters_say_what_usage_says(prefix_cache: PrefixCache) -> None:
    driver = Driver(ScriptedModel(num_blocks=12), prefix_cache=prefix_cache, prefill_chunk=CHUNK)
    asked = 0
    for seed in range(12):
        request = greedy(text(6 + seed, seed % 2), 6)
        driver.add(request)
        asked += len(request.prompt)
        if seed % 3 == 2:
            driver.run()
    stats = driver.engine.stats()
    assert stats.prefix_tokens_asked == asked
    assert stats.prefix_tokens_hit == sum(driver.cached.values()) > 0


async def test_b127_leaving_with_the_last_token_frees_nothing_twice(autojump_clock: trio.testing.MockClock) -> None:
    """The client leaves in every moment around the last token."""
    async with running(new_loop()) as loop:
        for seconds in (1.0, 1.5, 2.0, 2.5):
            with trio.move_on_after(seconds):
                async with loop.submit([greedy([1], 3)]) as generation:
                    await tokens_of(generation)
            await loop.wait_idle()
            stats = loop.stats()
            assert (stats.num_blocks_free, stats.num_blocks_used, stats.num_running) == (64, 0, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"repetition_penalty": 50.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": ((7, 100.0),)},
    ],
    ids=str,
)
def test_b128_every_sampling_field_has_an_effect(changed: dict[str, object]) -> None:
    plain = GenRequest((1, 2, 3), 30, SamplingParams(), seed=4)
    params = dataclasses.replace(plain.params, **changed)  # type: ignore[arg-type]  # values of several types
    model = ScriptedModel()
    assert Driver(model).finish(plain) != Driver(model).finish(dataclasses.replace(plain, params=params))

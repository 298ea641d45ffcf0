"""Eleven blocks of four tokens, exact block ids."""

from __future__ import annotations

import pytest

from tests.engine.harness import PrefixCache, greedy
from tlserve.engine.kv_cache import KvCache
from tlserve.engine.request import GenRequest, RequestId
from tlserve.engine.state import RequestState

PROMPT = list(range(10))  # two blocks and two tokens


def new_cache(prefix_cache: PrefixCache = "radix", num_blocks: int = 11) -> KvCache:
    return KvCache(num_blocks, 4, prefix_cache=prefix_cache, num_slots=4, max_model_len=44)


def admit(cache: KvCache, prompt: list[int], *, is_pooling: bool = False) -> RequestState:
    request = GenRequest(tuple(prompt), 0, is_pooling=True) if is_pooling else greedy(prompt, 8)
    state = RequestState.new(RequestId(0), request)
    assert cache.admit(state, headroom=0)
    return state


def compute(cache: KvCache, state: RequestState, num_tokens: int) -> None:
    state.num_computed_tokens = num_tokens
    cache.publish(state)


def test_admission_takes_blocks_for_all_known_tokens() -> None:
    cache = new_cache("off")
    state = admit(cache, PROMPT)
    assert state.block_ids == [0, 1, 2]
    assert cache.block_tables[state.slot, :3].tolist() == [0, 1, 2]
    cache.check_invariants([state])


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_computed_blocks_are_shared_while_their_request_still_runs(kind: PrefixCache) -> None:
    cache = new_cache(kind)
    first = admit(cache, PROMPT)
    compute(cache, first, 8)
    second = admit(cache, PROMPT)
    assert second.block_ids == [0, 1, 3]
    assert second.num_computed_tokens == second.num_cached_tokens == 8
    cache.check_invariants([first, second])


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_blocks_that_are_not_computed_are_never_shared(kind: PrefixCache) -> None:
    cache = new_cache(kind)
    first = admit(cache, PROMPT)
    compute(cache, first, 7)
    second = admit(cache, PROMPT)
    assert second.block_ids[0] == 0
    assert second.num_cached_tokens == 4


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_full_hit_leaves_the_last_token_to_compute(kind: PrefixCache) -> None:
    cache = new_cache(kind)
    first = admit(cache, PROMPT[:8])
    compute(cache, first, 8)
    cache.release(first)
    second = admit(cache, PROMPT[:8])
    assert second.num_cached_tokens == 4
    assert second.num_pending_tokens == 4


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_two_who_compute_the_same_block_end_up_with_one(kind: PrefixCache) -> None:
    cache = new_cache(kind)
    first, second = admit(cache, PROMPT), admit(cache, PROMPT)
    assert (first.block_ids, second.block_ids) == ([0, 1, 2], [3, 4, 5])
    compute(cache, first, 8)
    compute(cache, second, 8)
    assert second.block_ids == [0, 1, 5]
    assert cache.block_tables[second.slot, :3].tolist() == [0, 1, 5]
    assert cache.blocks.num_free == 7
    cache.check_invariants([first, second])


def test_a_tail_is_taken_over_by_the_next_turn() -> None:
    cache = new_cache("radix")
    first = admit(cache, PROMPT)
    compute(cache, first, 10)
    cache.release(first)
    assert cache.blocks.eviction_order() == [2, 1, 0]
    second = admit(cache, [*PROMPT, 11, 12])
    assert second.num_cached_tokens == 10
    assert second.block_ids == [0, 1, 2]
    cache.check_invariants([second])


def test_a_tail_is_given_to_one_request_only() -> None:
    cache = new_cache("radix")
    first = admit(cache, PROMPT)
    compute(cache, first, 10)
    cache.release(first)
    second, third = admit(cache, [*PROMPT, 11]), admit(cache, [*PROMPT, 12])
    assert (second.num_cached_tokens, third.num_cached_tokens) == (10, 8)
    assert second.block_ids[2] != third.block_ids[2]
    cache.check_invariants([second, third])


def test_without_room_nothing_changes() -> None:
    cache = new_cache("radix", num_blocks=4)
    first = admit(cache, PROMPT[:8])
    compute(cache, first, 8)
    state = RequestState.new(RequestId(1), greedy(list(range(20)), 8))
    assert not cache.admit(state, headroom=0)
    assert state.block_ids == []
    assert (cache.blocks.num_used, cache.blocks.num_free) == (2, 2)
    cache.check_invariants([first])


def test_headroom_is_left_for_those_that_run() -> None:
    cache = new_cache("off", num_blocks=4)
    state = RequestState.new(RequestId(1), greedy(PROMPT, 8))
    assert not cache.admit(state, headroom=2)
    assert cache.admit(state, headroom=1)


def test_the_path_of_a_running_request_is_never_evicted() -> None:
    cache = new_cache("radix", num_blocks=5)
    first = admit(cache, PROMPT)
    compute(cache, first, 10)
    cache.release(first)
    second = admit(cache, [*PROMPT[:8], 50])  # holds 0 and 1
    third = admit(cache, [60, 61, 62, 63, 64])  # must evict 2, the only one not held
    assert second.block_ids[:2] == [0, 1]
    assert 2 in third.block_ids
    assert cache.blocks.num_evictions == 1
    cache.check_invariants([second, third])


def test_leaves_go_before_what_they_continue_and_old_ones_first() -> None:
    cache = new_cache("radix")
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]):
        state = admit(cache, prompt)
        compute(cache, state, 8)
        cache.release(state)
    assert cache.blocks.eviction_order() == [1, 2, 0]


def test_pooling_requests_neither_find_nor_leave_anything() -> None:
    cache = new_cache("radix")
    first = admit(cache, PROMPT)
    compute(cache, first, 8)
    pooling = admit(cache, PROMPT, is_pooling=True)
    assert pooling.num_cached_tokens == 0
    compute(cache, pooling, 10)
    cache.check_invariants([first, pooling])
    cache.release(pooling)
    assert cache.blocks.num_free == 8
    assert cache.num_tokens_asked == 10  # of the first alone


def test_a_resumed_request_is_not_counted_as_a_hit() -> None:
    cache = new_cache("radix")
    state = admit(cache, PROMPT)
    compute(cache, state, 10)
    cache.release(state)
    assert cache.admit(state, headroom=0)
    assert state.num_computed_tokens == 8
    assert state.num_cached_tokens == 0
    assert (cache.num_tokens_asked, cache.num_tokens_hit) == (10, 0)

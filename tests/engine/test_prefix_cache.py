"""Both caches, with blocks of two tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tlserve.engine.prefix_cache import CacheEntry, HashCache, PrefixCache, Tokens
from tlserve.engine.radix_cache import RadixCache


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def key(*values: int) -> bytes:
    return tokens(*values).tobytes()


def extend(cache: PrefixCache, *blocks: tuple[tuple[int, ...], int]) -> CacheEntry:
    """Add a path of (tokens, block id) from the root."""
    entry = cache.root
    for values, block_id in blocks:
        entry = cache.extend(entry, key(*values), block_id)
    return entry


@pytest.fixture(params=[HashCache, RadixCache])
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    made: PrefixCache = request.param(2)
    return made


@pytest.fixture
def radix() -> RadixCache:
    return RadixCache(2)


def test_an_empty_cache_finds_nothing(cache: PrefixCache) -> None:
    assert cache.match(tokens(1, 2, 3)) == ([], cache.root, None)


def test_whole_blocks_of_the_longest_stored_prefix_are_found(cache: PrefixCache) -> None:
    extend(cache, ((1, 2), 7), ((3, 4), 8), ((5, 6), 9))
    assert cache.match(tokens(1, 2, 3, 4, 5)).block_ids == [7, 8]
    assert cache.match(tokens(1, 2, 9, 4)).block_ids == [7]
    assert cache.match(tokens(1)).block_ids == []
    cache.check_invariants()


def test_the_same_tokens_after_another_prefix_are_another_entry(cache: PrefixCache) -> None:
    extend(cache, ((1, 2), 7), ((3, 4), 8))
    extend(cache, ((5, 6), 1), ((3, 4), 2))
    assert cache.match(tokens(5, 6, 3, 4)).block_ids == [1, 2]
    assert cache.match(tokens(3, 4)).block_ids == []


def test_who_comes_second_gets_the_entry_of_the_first(cache: PrefixCache) -> None:
    first = extend(cache, ((1, 2), 7))
    assert extend(cache, ((1, 2), 3)) is first
    assert cache.holds(7)
    assert not cache.holds(3)


def test_an_evicted_block_is_found_no_more(cache: PrefixCache) -> None:
    extend(cache, ((1, 2), 7), ((3, 4), 8))
    cache.evict(8)
    assert not cache.holds(8)
    assert cache.match(tokens(1, 2, 3, 4)).block_ids == [7]
    cache.check_invariants()


def test_the_hash_cache_keeps_full_blocks_only() -> None:
    cache = HashCache(2)
    cache.add_tail(cache.root, key(1), 5)
    assert not cache.holds(5)


def test_a_tail_is_found_by_a_prompt_that_continues_all_of_it(radix: RadixCache) -> None:
    entry = extend(radix, ((1, 2), 7))
    radix.add_tail(entry, key(3), 8)
    found = radix.match(tokens(1, 2, 3, 9))
    assert found.tail is not None
    assert (found.block_ids, found.tail.block_id) == ([7], 8)
    assert radix.match(tokens(1, 2, 4, 9)).tail is None
    assert radix.match(tokens(3, 9)).tail is None
    radix.check_invariants()


def test_the_longest_of_several_tails_is_found() -> None:
    radix = RadixCache(4)
    radix.add_tail(radix.root, key(1), 5)
    radix.add_tail(radix.root, key(1, 2, 3), 6)
    radix.add_tail(radix.root, key(1, 2, 9), 7)
    tail = radix.match(tokens(1, 2, 3, 4)).tail
    assert tail is not None
    assert tail.block_id == 6


def test_a_tail_taken_over_is_gone(radix: RadixCache) -> None:
    radix.add_tail(radix.root, key(3), 8)
    tail = radix.match(tokens(3, 4)).tail
    assert tail is not None
    radix.take_tail(tail)
    assert not radix.holds(8)
    assert radix.match(tokens(3, 4)).tail is None
    radix.check_invariants()


def test_an_equal_tail_is_kept_once(radix: RadixCache) -> None:
    radix.add_tail(radix.root, key(3), 8)
    radix.add_tail(radix.root, key(3), 9)
    assert radix.holds(8)
    assert not radix.holds(9)


def test_an_inner_block_of_the_tree_is_never_evicted(radix: RadixCache) -> None:
    extend(radix, ((1, 2), 7), ((3, 4), 8))
    with pytest.raises(AssertionError, match="before the blocks that continue it"):
        radix.evict(7)


def test_a_block_knows_what_it_continues(radix: RadixCache) -> None:
    extend(radix, ((1, 2), 7), ((3, 4), 8))
    assert radix.parent_block(7) is None
    assert radix.parent_block(8) == 7


def test_invariants_notice_an_entry_that_is_cut_off(radix: RadixCache) -> None:
    extend(radix, ((1, 2), 7), ((3, 4), 8))
    radix.root.children.clear()
    with pytest.raises(AssertionError, match="cut off from the root"):
        radix.check_invariants()

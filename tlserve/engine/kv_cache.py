"""Which block holds which token of which request: the one place that moves blocks between holders."""

# The life of a block table (the intervals are those of state.py):
#
# admit     shares the blocks of the longest published prefix and takes new ones for all other known tokens
# reserve   adds blocks for tokens to come
# publish   makes each block findable once all of its tokens are computed and none is a guess
# release   gives everything back, from the tail; the last block, not full, is kept as a tail where it can be

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlserve.engine.block_manager import BlockManager
from tlserve.engine.prefix_cache import CacheEntry, HashCache, Match, PrefixCache
from tlserve.engine.radix_cache import RadixCache
from tlserve.engine.state import RequestState


def new_prefix_cache(kind: str, block_size: int) -> PrefixCache | None:
    """The cache that the configuration key ``prefix_cache`` names."""
    match kind:
        case "radix":
            return RadixCache(block_size)
        case "hash":
            return HashCache(block_size)
        case "off":
            return None
    raise AssertionError(f"no prefix cache is called {kind!r}")


class KvCache:
    """Blocks, the prefix cache over them and the tables that the model reads."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: str, num_slots: int, max_model_len: int
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = new_prefix_cache(prefix_cache, block_size)
        self.blocks = BlockManager(num_blocks, on_evict=self._evict)
        # [num_slots, blocks of the longest request] a row for each running request, stale past its last block
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots, self.num_blocks_for(max_model_len)), np.int32)
        self._free_slots = list(reversed(range(num_slots)))
        self.num_tokens_admitted = 0  # of prompts, whether the cache is asked for them or not
        self.num_tokens_asked = 0
        self.num_tokens_hit = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_coming(self, state: RequestState, readers: Sequence[RequestState]) -> bool:
        """Whether one of ``readers`` will publish the block that a waiting request could share next.

        They read prompts now; to read the same tokens beside them would double the work and end no sooner.
        """
        if self.prefix_cache is None or state.is_pooling or not readers:
            return False
        end = (len(self._match(state).block_ids) + 1) * self.block_size
        beginning = state.tokens[:end]
        return end < state.num_tokens and any(
            end <= reader.num_tokens and not reader.is_pooling and np.array_equal(reader.tokens[:end], beginning)
            for reader in readers
        )

    def admit(self, state: RequestState, *, headroom: int) -> bool:
        """Give a waiting request a slot and blocks for all of its known tokens, or change nothing.

        ``headroom`` blocks must be left for those that run already.
        """
        found = self._match(state)
        shared = found.block_ids if found.tail is None else [*found.block_ids, found.tail.block_id]
        self.blocks.acquire(shared)
        count = self.num_blocks_for(state.num_tokens) - len(shared)
        taken = self.blocks.allocate(count) if count + headroom <= self.blocks.num_available else None
        if taken is None:
            for block_id in reversed(shared):
                self.blocks.release(block_id, is_cached=True)
            return False
        self._start(state, found, taken)
        return True

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Grow the table to hold ``num_tokens``; False, with nothing changed, when there is no room."""
        count = self.num_blocks_for(num_tokens) - len(state.block_ids)
        if count <= 0:
            return True
        taken = self.blocks.allocate(count)
        if taken is None:
            return False
        self._append(state, taken)
        return True

    def publish(self, state: RequestState) -> None:
        """Make the blocks findable that this step has filled. Does nothing for pooling requests."""
        if self.prefix_cache is None or state.is_pooling:
            return
        while (state.num_published_blocks + 1) * self.block_size <= state.num_computed_tokens:
            self._publish_block(self.prefix_cache, state, state.num_published_blocks)
            state.num_published_blocks += 1

    def release(self, state: RequestState) -> None:
        """Take slot and blocks from a running request and set it back to having computed nothing."""
        self._keep_tail(state)
        for block_id in reversed(state.block_ids):
            self.blocks.release(block_id, is_cached=self.prefix_cache is not None and self.prefix_cache.holds(block_id))
        self._free_slots.append(state.slot)
        state.slot = -1
        state.block_ids = []
        state.num_published_blocks = 0
        state.cache_entry = None
        state.num_computed_tokens = state.num_draft_computed = 0
        state.num_scheduled_tokens = state.num_draft_tokens = 0

    def _match(self, state: RequestState) -> Match:
        if self.prefix_cache is None:
            return Match([], CacheEntry(), None)
        if state.is_pooling:  # the hidden states of cached tokens are gone
            return Match([], self.prefix_cache.root, None)
        # One less than all: a full hit would leave no token to take logits from.
        return self.prefix_cache.match(state.tokens[: state.num_tokens - 1])

    def _start(self, state: RequestState, found: Match, taken: list[int]) -> None:
        num_hit = len(found.block_ids) * self.block_size
        state.slot = self._free_slots.pop()
        state.num_published_blocks = len(found.block_ids)
        if self.prefix_cache is not None:
            state.cache_entry = found.entry
        self._append(state, found.block_ids)
        if found.tail is not None:
            assert self.prefix_cache is not None
            self.prefix_cache.take_tail(found.tail)
            self._append(state, [found.tail.block_id])
            num_hit += len(found.tail.key) // state.tokens.itemsize
        self._append(state, taken)
        state.num_computed_tokens = state.num_draft_computed = num_hit
        if state.num_cached_tokens is None:  # a resumed request finds its own blocks: no news to its client
            state.num_cached_tokens = num_hit
            self.num_tokens_admitted += state.num_prompt_tokens
            if not state.is_pooling:
                self.num_tokens_asked += state.num_prompt_tokens
                self.num_tokens_hit += num_hit

    def _append(self, state: RequestState, block_ids: list[int]) -> None:
        start = len(state.block_ids)
        state.block_ids += block_ids
        self.block_tables[state.slot, start : len(state.block_ids)] = block_ids

    def _publish_block(self, cache: PrefixCache, state: RequestState, index: int) -> None:
        start = index * self.block_size
        block_id = state.block_ids[index]
        assert state.cache_entry is not None
        key = state.tokens[start : start + self.block_size].tobytes()
        state.cache_entry = cache.extend(state.cache_entry, key, block_id)
        first_id = state.cache_entry.block_id
        if first_id != block_id:  # another request was first; its bits are the same
            self.blocks.acquire([first_id])
            self.blocks.release(block_id, is_cached=False)
            state.block_ids[index] = first_id
            self.block_tables[state.slot, index] = first_id

    def _keep_tail(self, state: RequestState) -> None:
        if self.prefix_cache is None or state.is_pooling:
            return
        self.publish(state)
        start = state.num_published_blocks * self.block_size
        if start < state.num_computed_tokens:
            assert state.cache_entry is not None
            key = state.tokens[start : state.num_computed_tokens].tobytes()
            self.prefix_cache.add_tail(state.cache_entry, key, state.block_ids[state.num_published_blocks])

    def _evict(self, block_id: int) -> None:
        assert self.prefix_cache is not None, f"block {block_id} was never cached"
        self.prefix_cache.evict(block_id)

    def check_invariants(self, running: list[RequestState]) -> None:
        """``running``: every request that holds blocks."""
        self.blocks.check_invariants()
        holders = [0] * self.blocks.num_blocks
        for state in running:
            self._check_table(state)
            for block_id in state.block_ids:
                holders[block_id] += 1
        for block_id, count in enumerate(holders):
            assert self.blocks.ref_count(block_id) == count, f"block {block_id} is held {count} times"
        slots = [state.slot for state in running]
        assert sorted(slots + self._free_slots) == list(range(len(self.block_tables)))
        self._check_cache()

    def _check_table(self, state: RequestState) -> None:
        num_blocks = len(state.block_ids)
        assert state.num_computed_tokens <= num_blocks * self.block_size
        assert num_blocks == len(set(state.block_ids))
        assert self.block_tables[state.slot, :num_blocks].tolist() == state.block_ids
        for index, block_id in enumerate(state.block_ids):
            is_published = index < state.num_published_blocks
            assert is_published or self.blocks.ref_count(block_id) == 1, f"block {block_id} is shared and written"
            if self.prefix_cache is not None:
                assert is_published == self.prefix_cache.holds(block_id)

    def _check_cache(self) -> None:
        if self.prefix_cache is None:
            assert self.blocks.num_cached == 0
            return
        self.prefix_cache.check_invariants()
        order = self.blocks.eviction_order()
        assert all(self.prefix_cache.holds(block_id) for block_id in order)
        if isinstance(self.prefix_cache, RadixCache):
            place = {block_id: i for i, block_id in enumerate(order)}
            for block_id in order:
                parent_id = self.prefix_cache.parent_block(block_id)
                assert parent_id is None or place.get(parent_id, len(order)) > place[block_id], (
                    "evicted before its leaves"
                )

"""Which KV blocks exist, how many holders each has, and which may be taken next."""

# Rule 1: this file knows block ids and counts, never tokens and never arrays.
# Rule 2: a block with holders is used; a block without is free (its content is worthless) or cached (the
#         prefix cache can still find its content). Each block is in exactly one of the three.
# Rule 3: free blocks are taken first, then cached ones from the front of the queue. A block joins the back
#         when its last holder leaves, and holders give a table back from its tail: so a block is always
#         evicted before the blocks that its content continues.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockManager:
    """Hands out block ids. Every operation on one block is O(1)."""

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None]) -> None:
        """``on_evict`` is called with each cached block that is taken for something else."""
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # a stack: the block used last is the warmest
        # In eviction order. An OrderedDict is a linked list with an index: a cached block that is wanted
        # again leaves from the middle, which a deque does in O(n) and a heap not at all.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def eviction_order(self) -> list[int]:
        """The cached blocks, the next to be evicted first."""
        return list(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one holder each, or none when there are not so many."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a holder to blocks whose content is wanted: used ones, or cached ones that so become used."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, is_cached: bool) -> None:
        """Take a holder away. After the last one the block is cached, or free when nobody can find its content."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} released without a holder"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        if is_cached:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self.num_evictions += 1
            self._on_evict(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def check_invariants(self) -> None:
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert all(count >= 0 for count in self._ref_counts)
        for block_id, count in enumerate(self._ref_counts):
            assert (count == 0) == (block_id in free or block_id in cached), f"block {block_id} has {count} holders"

    def __repr__(self) -> str:
        return f"<BlockManager used={self.num_used} cached={self.num_cached} free={self.num_free}>"

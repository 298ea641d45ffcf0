"""The tree of all token sequences whose keys and values are still in some block."""

# Rule 1: an edge is one block of tokens, because a block is what is shared and evicted: a longer edge would
#         be split again by the first eviction or by the first prompt that leaves it.
# Rule 2: there is one entry for each prefix. Who has computed the same block a second time drops it and
#         holds the tree's: the bits are the same.
# Rule 3: so every holder of a block holds the path to it, gives it back from the tail, and the block manager's
#         queue evicts leaves first, least recently used first, in O(1). A held path is in no queue.
# Rule 4: a tail is a block that is not full. It is never shared, for its next holder writes behind it; a
#         prompt that continues all of its tokens takes it over.

from __future__ import annotations

from tlserve.engine.prefix_cache import CacheEntry, Match, Tokens


class RadixCache:
    def __init__(self, block_size: int) -> None:
        self.root = CacheEntry()
        self._block_bytes = block_size * 4
        self._by_block: dict[int, CacheEntry] = {}

    def match(self, tokens: Tokens) -> Match:
        data = tokens.tobytes()
        block_ids: list[int] = []
        entry = self.root
        start = 0
        while start + self._block_bytes <= len(data):
            child = entry.children.get(data[start : start + self._block_bytes])
            if child is None:
                break
            entry = child
            block_ids.append(entry.block_id)
            start += self._block_bytes
        return Match(block_ids, entry, self._longest_tail(entry, data[start : start + self._block_bytes]))

    def _longest_tail(self, entry: CacheEntry, data: bytes) -> CacheEntry | None:
        if not entry.tails:
            return None
        lengths = range(min(len(data), self._block_bytes - 4), 0, -4)
        return next((entry.tails[data[:n]] for n in lengths if data[:n] in entry.tails), None)

    def extend(self, entry: CacheEntry, key: bytes, block_id: int) -> CacheEntry:
        child = entry.children.get(key)
        if child is None:
            child = self._new_entry(entry, key, block_id)
            entry.children[key] = child
        return child

    def add_tail(self, entry: CacheEntry, key: bytes, block_id: int) -> None:
        if key not in entry.tails:
            entry.tails[key] = self._new_entry(entry, key, block_id)

    def take_tail(self, tail: CacheEntry) -> None:
        assert tail.parent is not None
        del tail.parent.tails[tail.key]
        del self._by_block[tail.block_id]

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_block

    def evict(self, block_id: int) -> None:
        entry = self._by_block.pop(block_id)
        assert not entry.children, f"block {block_id} is evicted before the blocks that continue it"
        assert not entry.tails, f"block {block_id} is evicted before its tails"
        assert entry.parent is not None
        siblings = entry.parent.children if len(entry.key) == self._block_bytes else entry.parent.tails
        del siblings[entry.key]

    def parent_block(self, block_id: int) -> int | None:
        """The block that this one continues; None for the first of a sequence."""
        parent = self._by_block[block_id].parent
        assert parent is not None
        return None if parent is self.root else parent.block_id

    def _new_entry(self, parent: CacheEntry, key: bytes, block_id: int) -> CacheEntry:
        assert block_id not in self._by_block, f"block {block_id} is in the tree twice"
        entry = CacheEntry(parent=parent, key=key, block_id=block_id)
        self._by_block[block_id] = entry
        return entry

    def check_invariants(self) -> None:
        reached: set[int] = set()
        pending = [self.root]
        while pending:
            entry = pending.pop()
            for key, child in (*entry.children.items(), *entry.tails.items()):
                assert child.parent is entry
                assert child.key == key
                assert self._by_block[child.block_id] is child
                reached.add(child.block_id)
            assert all(len(key) == self._block_bytes for key in entry.children)
            assert all(0 < len(key) < self._block_bytes for key in entry.tails)
            assert all(not tail.children and not tail.tails for tail in entry.tails.values())
            pending.extend(entry.children.values())
        assert reached == set(self._by_block), "an entry is cut off from the root"

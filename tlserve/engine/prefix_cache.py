"""Finding KV blocks by the tokens whose keys and values they hold."""

# Rule 1: a cache knows tokens and block ids, never how many holders a block has.
# Rule 2: an entry says "this block holds these tokens after exactly that prefix". The prefix is named by
#         its own entry and the tokens are compared byte for byte, so no hash can ever pass for a match.
# Rule 3: whoever extends a path has computed all of it, from tokens that are no longer guesses.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class CacheEntry:
    """One block of tokens after the prefix that ``parent`` ends. The root stands for the empty prefix."""

    parent: CacheEntry | None = None
    key: bytes = b""  # the block's tokens
    block_id: int = -1  # the root has none
    children: dict[bytes, CacheEntry] = field(default_factory=dict)  # full blocks that continue it (radix)
    tails: dict[bytes, CacheEntry] = field(default_factory=dict)  # blocks that are not full yet (radix)


class Match(NamedTuple):
    """The longest stored prefix of some tokens."""

    block_ids: list[int]  # whole blocks, to be shared
    entry: CacheEntry  # of the last of them, or the root
    tail: CacheEntry | None  # a block that is not full, which the finder may take over


class PrefixCache(Protocol):
    root: CacheEntry

    def match(self, tokens: Tokens) -> Match:
        """The longest stored prefix. Does not modify the cache; holds until the next allocation of a block."""
        ...

    def extend(self, entry: CacheEntry, key: bytes, block_id: int) -> CacheEntry:
        """The entry of a full block after ``entry``; a new one for ``block_id`` where there was none.

        When the entry names another block, that one holds the same bits, and the caller goes on with it.
        """
        ...

    def add_tail(self, entry: CacheEntry, key: bytes, block_id: int) -> None:
        """Keep a block that is not full, when the cache can. Its last holder is leaving it."""
        ...

    def take_tail(self, tail: CacheEntry) -> None:
        """Forget a tail of ``match``: its block now belongs to the finder, who will write behind it."""
        ...

    def holds(self, block_id: int) -> bool:
        """Whether the content of this block can be found."""
        ...

    def evict(self, block_id: int) -> None:
        """Forget a block because it is taken for something else."""
        ...

    def check_invariants(self) -> None: ...


class HashCache:
    """A flat table of full blocks, found by the entry of their prefix and their tokens.

    Blocks are only ever evicted one by one, so nothing here knows which entries continue which.
    """

    def __init__(self, block_size: int) -> None:
        self.root = CacheEntry()
        self._block_bytes = block_size * 4
        self._entries: dict[tuple[CacheEntry, bytes], CacheEntry] = {}  # entries hash by identity
        self._by_block: dict[int, CacheEntry] = {}

    def match(self, tokens: Tokens) -> Match:
        data = tokens.tobytes()
        block_ids: list[int] = []
        entry = self.root
        for start in range(0, len(data) - self._block_bytes + 1, self._block_bytes):
            found = self._entries.get((entry, data[start : start + self._block_bytes]))
            if found is None:
                break
            entry = found
            block_ids.append(entry.block_id)
        return Match(block_ids, entry, None)

    def extend(self, entry: CacheEntry, key: bytes, block_id: int) -> CacheEntry:
        found = self._entries.get((entry, key))
        if found is None:
            found = CacheEntry(parent=entry, key=key, block_id=block_id)
            self._entries[entry, key] = found
            self._by_block[block_id] = found
        return found

    def add_tail(self, entry: CacheEntry, key: bytes, block_id: int) -> None:
        return None  # full blocks only

    def take_tail(self, tail: CacheEntry) -> None:
        raise AssertionError("this cache has no tails")

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_block

    def evict(self, block_id: int) -> None:
        entry = self._by_block.pop(block_id)
        assert entry.parent is not None
        del self._entries[entry.parent, entry.key]

    def check_invariants(self) -> None:
        assert len(self._entries) == len(self._by_block)
        for (parent, key), entry in self._entries.items():
            assert entry.parent is parent
            assert entry.key == key
            assert len(key) == self._block_bytes
            assert self._by_block[entry.block_id] is entry

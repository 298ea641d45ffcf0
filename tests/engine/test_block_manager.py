from __future__ import annotations

import pytest

from tlserve.engine.block_manager import BlockManager


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def blocks(evicted: list[int]) -> BlockManager:
    return BlockManager(4, on_evict=evicted.append)


def test_blocks_are_taken_in_order_from_a_new_pool(blocks: BlockManager) -> None:
    assert blocks.allocate(3) == [0, 1, 2]
    assert (blocks.num_used, blocks.num_free, blocks.num_cached) == (3, 1, 0)
    blocks.check_invariants()


def test_no_room_is_none_and_changes_nothing(blocks: BlockManager) -> None:
    blocks.allocate(2)
    assert blocks.allocate(3) is None
    assert blocks.num_free == 2


def test_a_shared_block_is_used_until_its_last_holder_leaves(blocks: BlockManager) -> None:
    blocks.allocate(1)
    blocks.acquire([0])
    blocks.release(0, is_cached=True)
    assert (blocks.ref_count(0), blocks.num_used) == (1, 1)
    blocks.release(0, is_cached=True)
    assert (blocks.num_used, blocks.num_cached) == (0, 1)
    blocks.check_invariants()


def test_free_blocks_go_before_cached_ones_and_those_in_the_order_they_were_left(
    blocks: BlockManager, evicted: list[int]
) -> None:
    blocks.allocate(4)
    blocks.release(2, is_cached=True)
    blocks.release(0, is_cached=True)
    blocks.release(3, is_cached=False)
    assert blocks.eviction_order() == [2, 0]
    assert blocks.allocate(2) == [3, 2]
    assert evicted == [2]
    assert blocks.num_evictions == 1


def test_a_cached_block_that_is_wanted_again_leaves_the_middle_of_the_queue(
    blocks: BlockManager, evicted: list[int]
) -> None:
    blocks.allocate(4)
    for block_id in (3, 2, 1):
        blocks.release(block_id, is_cached=True)
    blocks.acquire([2])
    assert blocks.eviction_order() == [3, 1]
    blocks.release(2, is_cached=True)
    assert blocks.eviction_order() == [3, 1, 2]
    assert evicted == []
    blocks.check_invariants()


def test_a_block_without_a_holder_cannot_be_released(blocks: BlockManager) -> None:
    with pytest.raises(AssertionError, match="block 1 released without a holder"):
        blocks.release(1, is_cached=False)


def test_invariants_notice_a_block_that_is_lost(blocks: BlockManager) -> None:
    blocks.allocate(1)
    blocks._ref_counts[0] = 0
    with pytest.raises(AssertionError, match="block 0 has 0 holders"):
        blocks.check_invariants()


def test_the_repr_shows_the_counts(blocks: BlockManager) -> None:
    blocks.allocate(3)
    blocks.release(2, is_cached=True)
    assert repr(blocks) == "<BlockManager used=2 cached=1 free=1>"

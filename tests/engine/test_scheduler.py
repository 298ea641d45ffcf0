"""Who runs when, seen through the batches that the model gets."""

from __future__ import annotations

import pytest

from tests.engine.harness import Driver, PrefixCache, greedy
from tests.fakes import ScriptedModel
from tlserve.engine.scheduler import YOUNG
from tlserve.model.batch import Batch


def rows_per_slot(batch: Batch) -> dict[int, int]:
    slots = batch.request_rows.tolist()
    return {slot: slots.count(slot) for slot in dict.fromkeys(slots)}


def test_one_step_mixes_prompts_and_single_tokens() -> None:
    driver = Driver(ScriptedModel(), prefill_chunk=8)
    driver.add(greedy([1, 2, 3]))
    driver.step()
    driver.add(greedy(list(range(12))))
    driver.step()
    assert rows_per_slot(driver.model.batches[-1]) == {0: 1, 1: 8}
    driver.step()
    assert rows_per_slot(driver.model.batches[-1]) == {0: 1, 1: 4}
    driver.run()
    driver.check_outputs()


def test_a_stream_gets_a_token_in_every_step_while_a_long_prompt_is_read() -> None:
    driver = Driver(ScriptedModel(), prefill_chunk=8, max_batch_tokens=10)
    stream = driver.add(greedy([1, 2], 30))
    driver.step()
    driver.add(greedy([3] * 60))
    for expected in range(2, 10):
        driver.step()
        assert len(driver.drawn[stream]) == expected


@pytest.mark.parametrize(
    ("num_streams", "num_prompt_tokens"), [(0, 40), (1, 7), (5, 7), (6, 10), (7, 10), (8, 12), (9, 15)]
)
def test_prompts_share_few_tokens_of_a_step_while_streams_run(num_streams: int, num_prompt_tokens: int) -> None:
    """1.5 tokens for each stream, counting at least five, or up to 1.75 that make the step whole eights.

    A step then stays under 2.5 times one without a prompt.
    """
    driver = Driver(ScriptedModel(), prefill_chunk=0, max_num_seqs=10)
    for _ in range(num_streams):
        driver.add(greedy([1, 2], 30, priority=-5))
    for _ in range(YOUNG):
        driver.step()
    driver.add(greedy([3] * 40, priority=5))
    driver.add(greedy([4] * 40))
    driver.step()
    rows = rows_per_slot(driver.model.batches[-1])
    assert all(rows[slot] == 1 for slot in range(num_streams))
    assert rows[num_streams] == num_prompt_tokens
    assert len(rows) == num_streams + (2 if num_streams == 0 else 1)


def test_a_burst_that_comes_over_some_steps_is_read_as_one_that_comes_at_once() -> None:
    """Until a stream has four tokens; a prompt that comes later has its share only, also beside younger streams."""
    driver = Driver(ScriptedModel(), prefill_chunk=0, max_num_seqs=10)
    for slot in range(YOUNG):
        driver.add(greedy([slot] * 40, 30))
        driver.step()
        assert rows_per_slot(driver.model.batches[-1]) == {**dict.fromkeys(range(slot), 1), slot: 40}
    driver.add(greedy([9] * 40, 30))
    driver.step()
    assert rows_per_slot(driver.model.batches[-1]) == {**dict.fromkeys(range(YOUNG), 1), YOUNG: 7}


def test_the_streams_of_a_full_budget_leave_the_rest_to_prompts() -> None:
    driver = Driver(ScriptedModel(), max_batch_tokens=4)
    driver.add(greedy([1, 2], 30))
    driver.step()
    driver.add(greedy([3] * 40))
    driver.step()
    assert rows_per_slot(driver.model.batches[-1]) == {0: 1, 1: 3}


def test_the_budget_bounds_every_step() -> None:
    driver = Driver(ScriptedModel(), max_batch_tokens=7)
    for prompt in ([1] * 20, [2] * 9, [3] * 3):
        driver.add(greedy(prompt))
    driver.run()
    assert max(len(batch.token_ids) for batch in driver.model.batches) == 7
    driver.check_outputs()


def test_a_budget_smaller_than_the_running_cap_stalls_nobody() -> None:
    """Who has begun gets a token in every step."""
    driver = Driver(ScriptedModel(), max_num_seqs=8, max_batch_tokens=3, max_waiting=4)
    ids = [driver.add(greedy([token, 1], 6)) for token in range(6)]
    assert driver.engine.num_free_places == 3 + 4 - 6
    while driver.engine.has_work():
        begun = {i: len(driver.drawn[i]) for i in ids if 0 < len(driver.drawn[i]) < 6}
        driver.step()
        assert all(len(driver.drawn[i]) == count + 1 for i, count in begun.items())
    driver.check_outputs()


def test_waiting_requests_run_by_priority_then_by_arrival() -> None:
    driver = Driver(ScriptedModel(), max_num_seqs=1)
    ids = [driver.add(greedy([1, 2], 1, priority=priority)) for priority in (0, 5, 0, 5, -1)]
    order = []
    while driver.engine.has_work():
        order += [output.id for output in driver.step()]
    assert order == [ids[1], ids[3], ids[0], ids[2], ids[4]]


def test_who_comes_later_does_not_overtake_a_request_that_waits_for_blocks() -> None:
    driver = Driver(ScriptedModel(num_blocks=8), max_num_seqs=8)
    driver.add(greedy([1] * 20, 4))  # five of eight blocks
    driver.step()
    large, small = driver.add(greedy([2] * 16, 2)), driver.add(greedy([3], 2))
    driver.step()
    assert not driver.engine.has_started(large)
    assert not driver.engine.has_started(small)
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_prompt_that_begins_like_one_being_read_waits_for_it(prefix_cache: PrefixCache) -> None:
    """Twenty prompts with the same beginning cost it once, whether they come together or one by one."""
    shared = list(range(16)) * 3
    driver = Driver(ScriptedModel(num_blocks=200), prefix_cache=prefix_cache, prefill_chunk=16, max_num_seqs=20)
    for own in range(16):
        driver.add(greedy([*shared, own, own], 1))
    other = driver.add(greedy([9] * 8, 1))
    driver.step()
    assert [len(driver.drawn[other])] == [1]  # nobody reads its beginning: it does not wait
    driver.run()
    assert sum(len(batch.token_ids) for batch in driver.model.batches) == 8 + len(shared) + 16 * 2
    driver.check_outputs()


def test_a_more_urgent_prompt_does_not_wait_for_a_less_urgent_one() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="radix", prefill_chunk=4)
    driver.add(greedy([5] * 40, 1))
    driver.step()
    urgent = driver.add(greedy([5] * 40, 1, priority=1))
    driver.step()
    assert driver.engine.has_started(urgent)


def test_nobody_waits_for_a_block_that_would_be_no_use() -> None:
    """A full hit leaves the last token to compute, so a prompt of one block has nothing to gain from its equal."""
    driver = Driver(ScriptedModel(), prefix_cache="radix")
    ids = [driver.add(greedy([1, 2, 3, 4], 1)) for _ in range(2)]
    driver.step()
    assert [len(driver.drawn[i]) for i in ids] == [1, 1]


def test_who_waited_for_a_reader_that_leaves_reads_on_itself() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="radix", prefill_chunk=4)
    reader, waiting = driver.add(greedy([5] * 40, 1)), driver.add(greedy([5] * 40, 1))
    driver.step()
    assert not driver.engine.has_started(waiting)
    driver.engine.abort(reader)
    driver.run()
    assert driver.cached[waiting] == 4
    driver.check_outputs()


def test_the_least_urgent_request_is_preempted_and_loses_nothing() -> None:
    driver = Driver(ScriptedModel(num_blocks=8), prefix_cache="off")
    ids = [driver.add(greedy([token] * 8, 16, priority=priority)) for token, priority in ((1, 0), (2, 5), (3, 0))]
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    assert [len(driver.drawn[i]) for i in ids] == [16, 16, 16]
    driver.check_outputs()


def test_the_most_urgent_request_is_never_preempted() -> None:
    driver = Driver(ScriptedModel(num_blocks=7), prefix_cache="off")
    urgent = driver.add(greedy([1] * 8, 16, priority=9))
    driver.add(greedy([2] * 8, 16))
    for expected in range(1, 17):
        driver.step()
        assert len(driver.drawn[urgent]) == expected
    assert driver.engine.stats().num_preemptions > 0


def test_who_was_preempted_is_not_admitted_in_the_same_step() -> None:
    driver = Driver(ScriptedModel(num_blocks=5), prefix_cache="off")
    driver.add(greedy([1] * 7, 9))
    driver.add(greedy([2] * 7, 9))
    waiting = driver.add(greedy([3], 1))
    for _ in range(3):
        driver.step()
    assert driver.engine.stats().num_preemptions == 1
    assert not driver.engine.has_started(waiting)
    assert driver.engine.num_free_places == driver.engine.max_waiting - 2
    driver.run()
    driver.check_outputs()


def test_a_pool_one_block_larger_than_the_longest_request_finishes_any_mix() -> None:
    longest = 24
    driver = Driver(ScriptedModel(num_blocks=longest // 4 + 1), prefix_cache="radix", prefill_chunk=3)
    for length in range(1, 20):
        driver.add(greedy([length % 16] * length, longest - length, priority=length % 3))
    driver.run()
    driver.check_outputs()
    assert driver.engine.stats().num_blocks_used == 0


def test_a_finished_request_gives_its_blocks_back_in_the_same_step() -> None:
    driver = Driver(ScriptedModel())
    driver.add(greedy([1, 2, 3], 1))
    driver.step()
    assert driver.engine.stats().num_blocks_free == driver.model.num_blocks

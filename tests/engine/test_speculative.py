from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.harness import Driver, draft_model, greedy, prompt_lookup
from tests.fakes import ScriptedModel
from tlserve.config import EngineConfig
from tlserve.engine.engine import Engine
from tlserve.engine.request import GenRequest, SamplingParams
from tlserve.engine.speculative import LONGEST_PAUSE, DraftLength, NgramIndex, num_accepted
from tlserve.errors import ConfigError

COUNT_UP = {token: (token + 1) % 16 for token in range(16)}


@pytest.mark.parametrize(
    ("draft", "drawn", "expected"),
    [([1, 2], [1, 2, 3], 2), ([1, 2], [1, 9, 2], 1), ([1, 2], [2, 1, 2], 0), ([], [4], 0)],
)
def test_guesses_count_up_to_the_first_that_the_target_does_not_draw(
    draft: list[int], drawn: list[int], expected: int
) -> None:
    assert num_accepted(draft, drawn) == expected


def test_a_draft_grows_with_success_and_shrinks_to_what_was_right() -> None:
    length = DraftLength(8)
    assert length.next() == 8
    length.record(8, 2)
    assert length.next() == 3
    length.record(3, 3)
    assert length.next() == 6
    length.record(6, 6)
    assert length.next() == 8


def test_drafts_that_are_all_wrong_end_in_longer_and_longer_pauses() -> None:
    length = DraftLength(4)
    pauses = []
    for _ in range(11):
        pause = 0
        while length.next() == 0:
            pause += 1
        pauses.append(pause)
        length.record(1, 0)
    assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]


def test_one_right_guess_ends_the_backing_off() -> None:
    length = DraftLength(1)
    for _ in range(3):
        while length.next() == 0:
            pass
        length.record(1, 0)
    while length.next() == 0:
        pass
    length.record(1, 1)
    length.record(1, 0)
    assert [length.next(), length.next()] == [0, 1]


def test_the_longest_ngram_wins_and_its_latest_occurrence() -> None:
    index = NgramIndex(shortest=1, longest=3)
    index.extend([1, 2, 7, 5, 2, 8, 1, 2])
    assert index.continuation(3) == [7, 5, 2]  # (1, 2) beats the later (2,)
    index.extend([9, 2])
    assert index.continuation(2) == [9, 2]  # (9, 2) is new; (2,) was last followed by 9


def test_a_draft_past_the_end_goes_on_with_its_period() -> None:
    index = NgramIndex(shortest=1, longest=2)
    index.extend([4, 5, 6, 4, 5, 6, 4])
    assert index.continuation(7) == [5, 6, 4, 5, 6, 4, 5]


def test_text_without_repetition_gives_no_draft() -> None:
    index = NgramIndex(shortest=1, longest=3)
    index.extend([1, 2, 3])
    assert index.continuation(4) == []
    assert NgramIndex(shortest=1, longest=3).continuation(4) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.data())
def test_the_index_finds_what_a_scan_of_the_text_finds(text: list[int], shortest: int, data: st.DataObject) -> None:
    longest = data.draw(st.integers(shortest, 4))
    index = NgramIndex(shortest=shortest, longest=longest)
    cut = data.draw(st.integers(0, len(text)))
    index.extend(text[:cut])
    index.extend(text[cut:])
    assert index.continuation(1) == scanned(text, shortest, longest)


def scanned(text: list[int], shortest: int, longest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return [text[start + size]]
    return []


def test_prompt_lookup_draws_several_tokens_in_one_step_when_text_repeats() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP), speculative=prompt_lookup(4))
    driver.finish(greedy([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1], 20))
    driver.check_outputs()
    assert driver.num_steps == 4  # four guesses and a draw in each, from the step that reads the prompt on
    stats = driver.engine.stats()
    assert (stats.spec_tokens_drafted, stats.spec_tokens_accepted) == (16, 16)


def test_a_draft_model_that_agrees_is_always_right() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    model, draft = ScriptedModel(), ScriptedModel()  # the same hash
    driver = Driver(model, speculative=draft_model(3), draft=draft)
    driver.finish(GenRequest((1, 2, 3), 16, params, seed=5))
    driver.check_outputs()
    stats = driver.engine.stats()
    assert stats.spec_tokens_drafted == stats.spec_tokens_accepted == 12
    assert driver.num_steps == 4


def test_a_draft_model_that_never_agrees_is_soon_left_alone() -> None:
    driver = Driver(
        ScriptedModel(script=COUNT_UP), speculative=draft_model(4), draft=ScriptedModel(script={}, num_blocks=64)
    )
    driver.finish(greedy([1, 2], 60))
    driver.check_outputs()
    stats = driver.engine.stats()
    assert stats.spec_tokens_accepted == 0
    assert stats.spec_tokens_drafted < 16


def test_a_draft_model_has_seen_all_that_the_target_has() -> None:
    """After prefix hits, chunks, pauses and preemptions an equal draft model still guesses right."""
    driver = Driver(
        ScriptedModel(num_blocks=14),
        prefix_cache="radix",
        prefill_chunk=5,
        speculative=draft_model(3),
        draft=ScriptedModel(num_blocks=14),
    )
    for length in (9, 13, 20):
        driver.add(greedy([7] * length, 20))
    driver.run()
    driver.check_outputs()
    stats = driver.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.spec_tokens_accepted == stats.spec_tokens_drafted > 0


@pytest.mark.parametrize("salt", [0, 1])
def test_a_draft_model_computes_the_tokens_that_were_drawn_whatever_it_guessed(salt: int) -> None:
    draft = ScriptedModel(habit=3.0, salt=salt)
    driver = Driver(ScriptedModel(habit=3.0), speculative=draft_model(3), draft=draft)
    for seed in range(4):
        request = GenRequest((1, 2, seed), 30, SamplingParams(), seed=seed)
        tokens = [*request.prompt, *driver.finish(request)]
        block = draft.block_size  # it may be behind by that
        assert all(draft.has_computed(tokens[:n]) for n in range(1, len(tokens) - block))
    stats = driver.engine.stats()
    assert (stats.spec_tokens_accepted < stats.spec_tokens_drafted) == bool(salt)


def test_a_draft_model_with_a_shorter_context_stops_drafting_there() -> None:
    driver = Driver(ScriptedModel(), speculative=draft_model(4), draft=ScriptedModel(max_model_len=10))
    driver.finish(greedy([1, 2, 3], 30))
    driver.check_outputs()
    assert 0 < driver.engine.stats().spec_tokens_drafted <= 7


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_drafts_never_reach_past_max_tokens(max_tokens: int) -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP), speculative=prompt_lookup(8))
    prompt = [*range(16), 0, 1]
    assert len(driver.finish(greedy(prompt, max_tokens))) == max_tokens
    positions = [int(batch.positions.max()) for batch in driver.model.batches]
    assert max(positions) == len(prompt) + max_tokens - 2  # the last token is drawn, not computed


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
def test_drafts_end_with_a_stop_id(method: str) -> None:
    model = ScriptedModel(script=COUNT_UP)
    if method == "prompt_lookup":
        driver = Driver(model, speculative=prompt_lookup(8))
    else:
        driver = Driver(model, speculative=draft_model(8), draft=ScriptedModel(script=COUNT_UP))
    assert driver.finish(greedy([*range(16), 0], 30, stop_ids=frozenset({3}))) == [1, 2, 3]
    assert driver.engine.stats().spec_tokens_drafted == 3


def test_drafts_of_different_lengths_share_a_step() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP), speculative=prompt_lookup(8))
    driver.add(greedy([*range(16), 0, 1], 4))
    driver.add(greedy([*range(16), 0, 1], 12))
    driver.add(greedy([9, 5], 12))
    driver.run()
    driver.check_outputs()
    assert driver.model.batches[0].request_rows.tolist() == [0] * (18 + 3) + [1] * (18 + 8) + [2] * 2
    assert driver.model.batches[0].logits_rows.tolist() == [*range(17, 21), *range(38, 47), 48]


def test_drafts_spend_only_what_is_left_of_the_budget() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP), speculative=prompt_lookup(8), max_batch_tokens=12)
    driver.add(greedy([*range(16), 0, 1], 30))
    driver.step()
    driver.step()
    driver.add(greedy([3] * 16, 2))
    driver.step()
    assert driver.model.batches[-1].request_rows.tolist() == [0] * 5 + [1] * 7


def test_a_draft_model_must_have_the_vocabulary_of_the_model() -> None:
    config = EngineConfig(speculative=draft_model())
    with pytest.raises(ConfigError, match=r"its vocab_size must be the model's 16, got 17"):
        Engine(ScriptedModel(), config, max_waiting=1, draft_model=ScriptedModel(vocab_size=17))

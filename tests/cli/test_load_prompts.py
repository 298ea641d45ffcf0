"""Prompts have the wanted length by the server's own count."""

from __future__ import annotations

import pytest

from tlserve.cli.load_prompts import PROBE_WORDS, WORDS, Prompts, WordCost


@pytest.mark.parametrize(("per_word", "overhead"), [(1.0, 0), (1.0, 31), (1.25, 4), (6.0, 1)])
def test_two_probes_tell_what_words_cost(per_word: float, overhead: int) -> None:
    few, many = (round(per_word * words) + overhead for words in PROBE_WORDS)
    words = WordCost.from_probes(few, many).words_for(500)
    assert abs(words * per_word + overhead - 500) <= per_word


def test_a_prompt_has_a_word_at_least() -> None:
    assert WordCost(1.0, 40.0).words_for(8) == 1


def test_prompts_begin_as_asked_and_go_on_each_for_itself() -> None:
    prompts = Prompts(seed=3, num_words=30, num_shared_words=10)
    first, second = prompts.text(0).split(), prompts.text(1).split()
    assert len(first) == len(second) == 30
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]
    assert prompts.text(0) == Prompts(seed=3, num_words=30, num_shared_words=10).text(0)


def test_a_shared_prefix_longer_than_the_prompt_is_cut() -> None:
    assert len(Prompts(seed=3, num_words=5, num_shared_words=10).text(0).split()) == 5


def test_words_are_all_different() -> None:
    assert len(set(WORDS)) == len(WORDS)

from __future__ import annotations

import pytest

from tests.engine.harness import GREEDY, Driver, draft_model, greedy
from tests.fakes import ScriptedModel
from tlserve.config import SpeculativeConfig
from tlserve.engine.request import FinishReason, GenRequest, RequestId, SamplingParams
from tlserve.errors import ApiError, ContextLengthExceeded, InvalidRequest, Overloaded

COUNT_UP = {token: (token + 1) % 16 for token in range(16)}


def test_a_prompt_is_continued_to_max_tokens() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP))
    request_id = driver.add(greedy([1, 2], 3))
    driver.run()
    assert [(drawn.token, drawn.finish) for drawn in driver.drawn[request_id]] == [
        (3, None),
        (4, None),
        (5, FinishReason.LENGTH),
    ]


def test_a_stop_id_ends_the_request_and_is_its_last_token() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP))
    request_id = driver.add(greedy([1], 9, stop_ids=frozenset({4})))
    driver.run()
    assert [(drawn.token, drawn.finish) for drawn in driver.drawn[request_id]] == [
        (2, None),
        (3, None),
        (4, FinishReason.STOP),
    ]


def test_a_stop_id_drawn_as_the_last_allowed_token_is_a_stop() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP))
    request_id = driver.add(greedy([1], 3, stop_ids=frozenset({4})))
    driver.run()
    assert driver.drawn[request_id][-1].finish is FinishReason.STOP


def test_min_tokens_holds_stop_ids_back() -> None:
    driver = Driver(ScriptedModel(script=COUNT_UP))
    request = GenRequest((3,), 9, GREEDY, stop_ids=frozenset({4, 5}), min_tokens=2)
    tokens = driver.finish(request)
    assert not {4, 5} & set(tokens[:2])
    driver.check_outputs()


def test_requests_join_and_leave_the_batch_at_any_step() -> None:
    driver = Driver(ScriptedModel())
    for arrival in range(10):
        driver.add(greedy([arrival, 3, 5], arrival % 4 + 1))
        driver.step()
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_aborted_request_frees_its_blocks_at_once(num_steps: int) -> None:
    """Queued, in prefill, in decode."""
    driver = Driver(ScriptedModel(), prefill_chunk=4)
    request_id = driver.add(greedy([1] * 12, 30))
    for _ in range(num_steps):
        driver.step()
    driver.engine.abort(request_id)
    driver.engine.abort(request_id)
    driver.engine.check_invariants()
    assert driver.engine.stats().num_blocks_free == driver.model.num_blocks
    assert not driver.engine.has_work()
    assert driver.step() == []


def test_abort_leaves_the_others_alone() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="radix")
    ids = [driver.add(greedy([1, 2, 3, 4, 5, token], 20)) for token in range(4)]
    driver.step()
    driver.step()
    driver.engine.abort(ids[1])
    driver.run()
    assert [len(driver.drawn[i]) for i in ids] == [20, 1, 20, 20]
    driver.check_outputs()


def test_abort_all_empties_the_engine() -> None:
    driver = Driver(ScriptedModel(), max_num_seqs=2)
    for token in range(5):
        driver.add(greedy([token], 9))
    driver.step()
    driver.engine.abort_all()
    assert not driver.engine.has_work()
    assert driver.engine.stats().num_blocks_used == 0


def test_an_unknown_id_is_aborted_without_effect() -> None:
    engine = Driver(ScriptedModel()).engine
    before = engine.stats()
    engine.abort(RequestId(77))
    assert engine.stats() == before


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (GenRequest((), 1), InvalidRequest, "at least one token"),
        (GenRequest((16,), 1), InvalidRequest, "from 0 to 15"),
        (GenRequest((-1,), 1), InvalidRequest, "from 0 to 15"),
        (GenRequest((1,), 0), InvalidRequest, "max_tokens must be at least 1, got 0"),
        (GenRequest((1,), -1, is_pooling=True), InvalidRequest, "got -1"),
        (GenRequest((1,), 1, SamplingParams(logit_bias=((16, 1.0),))), InvalidRequest, "from 0 to 15"),
        (GenRequest((1,) * 30, 11), ContextLengthExceeded, "holds 40 tokens; .* 30 tokens of prompt and 11"),
        (GenRequest((1,) * 41, 0, is_pooling=True), ContextLengthExceeded, "asks for 41 tokens of prompt"),
    ],
)
def test_what_can_never_be_served_is_refused_on_arrival(
    request_: GenRequest, error: type[ApiError], message: str
) -> None:
    driver = Driver(ScriptedModel(max_model_len=40))
    with pytest.raises(error, match=message):
        driver.add(request_)
    assert not driver.engine.has_work()


def test_the_context_is_no_longer_than_the_pool() -> None:
    driver = Driver(ScriptedModel(num_blocks=5, max_model_len=100))
    assert driver.engine.max_model_len == 20
    with pytest.raises(ContextLengthExceeded):
        driver.add(greedy([1] * 18, 3))
    assert len(driver.finish(greedy([1] * 18, 2))) == 2


def test_a_full_queue_refuses_the_next_request() -> None:
    driver = Driver(ScriptedModel(), max_num_seqs=2, max_waiting=1)
    for _ in range(3):
        driver.add(greedy([1], 9))
    with pytest.raises(Overloaded, match="3 requests are running or waiting"):
        driver.add(greedy([1], 9))
    driver.run()
    driver.add(greedy([1], 9))


def test_free_places_count_the_queue_and_the_seats() -> None:
    driver = Driver(ScriptedModel(num_blocks=8), max_num_seqs=4, max_waiting=3)
    assert driver.engine.num_free_places == 7
    driver.add(greedy([1] * 16, 9))
    driver.step()
    assert driver.engine.num_free_places == 6
    driver.add(greedy([1] * 16, 9))
    driver.step()  # no blocks for it: the other seats are not to be had either
    assert driver.engine.num_free_places == 2


def test_started_means_admitted_once() -> None:
    driver = Driver(ScriptedModel(), max_num_seqs=1)
    first, second = driver.add(greedy([1], 2)), driver.add(greedy([2], 2))
    driver.step()
    assert driver.engine.has_started(first)
    assert not driver.engine.has_started(second)
    driver.run()
    assert driver.engine.has_started(second)


def test_stats_count_what_happens() -> None:
    driver = Driver(ScriptedModel(), prefix_cache="hash", max_num_seqs=1)
    driver.add(greedy([1] * 9, 3))
    driver.add(greedy([1] * 9, 3))
    driver.step()
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_batch_tokens) == (1, 1, 9)
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free) == (3, 0, 61)
    driver.run()
    stats = driver.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_batch_tokens) == (0, 0, 0)
    assert (stats.prefix_tokens_asked, stats.prefix_tokens_hit) == (18, 8)
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (0, 2)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (18, 6)


def test_tokens_are_counted_once_however_often_they_are_computed() -> None:
    """Neither what a preempted request computes again nor a wrong guess counts; an embedding's prompt does."""
    driver = Driver(
        ScriptedModel(num_blocks=8),
        speculative=draft_model(3),
        draft=ScriptedModel(num_blocks=8, salt=1),
        max_num_seqs=3,
    )
    for _ in range(3):
        driver.add(greedy([1, 2, 1, 2, 1], 20))
    driver.add(GenRequest((1, 2, 3), 0, is_pooling=True))
    driver.run()
    stats = driver.engine.stats()
    assert min(stats.num_preemptions, stats.spec_tokens_drafted - stats.spec_tokens_accepted) > 0
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (3 * 5 + 3, 3 * 20)
    assert stats.prefix_tokens_asked == 3 * 5


@pytest.mark.parametrize("speculative", [None, draft_model(3)], ids=["off", "draft_model"])
def test_the_next_turn_finds_all_that_the_last_one_computed(speculative: SpeculativeConfig | None) -> None:
    """All but its last token, which was drawn and never computed."""
    draft = ScriptedModel() if speculative else None  # the same model: every guess is right
    driver = Driver(ScriptedModel(), prefix_cache="radix", speculative=speculative, draft=draft)
    prompt = [1, 2, 3, 4, 5]
    answer = driver.finish(greedy(prompt, 8))
    turn = driver.add(greedy([*prompt, *answer, 7], 2))
    driver.run()
    assert driver.cached[turn] == len(prompt) + len(answer) - 1
    driver.check_outputs()


def test_a_step_without_requests_computes_nothing() -> None:
    driver = Driver(ScriptedModel())
    assert driver.step() == []
    assert driver.model.batches == []


def test_a_warm_up_leaves_no_trace() -> None:
    """The model and the sampler have run once; no block is taken, no counter moved, and answers are the same."""
    model = ScriptedModel()
    driver = Driver(model)
    before = driver.engine.stats()
    driver.engine.warm_up()
    assert len(model.batches) == 1
    assert driver.engine.stats() == before
    driver.add(greedy([1, 2, 3], 8))
    driver.run()
    driver.check_outputs()

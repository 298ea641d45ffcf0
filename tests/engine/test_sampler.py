"""What the kernel is told for each row; the drawing itself is the kernel's test."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine import reference_sampler
from tests.engine.harness import Driver
from tests.fakes import ScriptedModel
from tlserve.engine.request import FinishReason, GenRequest, RequestId, SamplingParams
from tlserve.engine.sampler import LogitsRow, Sampler
from tlserve.engine.state import RequestState
from tlserve.kernels import sampling
from tlserve.kernels.sampling import SampledTokens, SamplingRows


class Recorder:
    """A kernel that remembers the rows it was asked for."""

    rows: SamplingRows

    def __call__(self, logits: NDArray[np.float32], rows: SamplingRows) -> SampledTokens:
        self.rows = rows
        return reference_sampler.sample(logits, rows)


def state_of(request: GenRequest, output: list[int], *, draft: list[int] | None = None, slot: int = 0) -> RequestState:
    state = RequestState.new(RequestId(slot), request)
    state.slot = slot
    for token in output:
        state.append(token)
    state.num_draft_tokens = len(draft or [])
    state.tokens[state.num_tokens : state.num_tokens + state.num_draft_tokens] = draft or []
    return state


def asked(*rows: LogitsRow) -> SamplingRows:
    recorder = Recorder()
    Sampler(4, recorder).sample(np.zeros((len(rows), 8), np.float32), rows)
    return recorder.rows


def seen(rows: SamplingRows, r: int) -> dict[int, int]:
    part = slice(rows.seen_starts[r], rows.seen_starts[r + 1])
    return dict(zip(rows.seen_tokens[part].tolist(), rows.seen_counts[part].tolist(), strict=True))


def test_each_row_has_the_parameters_of_its_request() -> None:
    first = GenRequest((1,), 4, SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), seed=7)
    second = GenRequest((1,), 4, SamplingParams(repetition_penalty=2, presence_penalty=1, frequency_penalty=-1))
    rows = asked(LogitsRow(state_of(first, []), 0), LogitsRow(state_of(second, [5, 6], slot=2), 0))
    assert rows.temperature.tolist() == [0.5, 1.0]
    assert rows.top_k.tolist() == [3, 0]
    assert rows.top_p.tolist() == [pytest.approx(0.9), 1.0]
    assert rows.min_p.tolist() == [pytest.approx(0.1), 0.0]
    assert rows.repetition.tolist() == [1.0, 2.0]
    assert rows.presence.tolist() == [0.0, 1.0]
    assert rows.frequency.tolist() == [0.0, -1.0]
    assert rows.seed.tolist() == [7, 0]
    assert rows.draw_index.tolist() == [0, 2]
    assert rows.num_logprobs.tolist() == [-1, -1]


def test_a_slot_forgets_the_request_that_had_it_before() -> None:
    recorder = Recorder()
    sampler = Sampler(1, recorder)
    for temperature in (0.25, 0.75):
        request = GenRequest((1,), 4, SamplingParams(temperature=temperature, frequency_penalty=1.0))
        sampler.sample(np.zeros((1, 8), np.float32), [LogitsRow(state_of(request, []), 0)])
        assert recorder.rows.temperature.tolist() == [temperature]
        assert seen(recorder.rows, 0) == {1: 0}


def test_penalties_know_prompt_from_output() -> None:
    request = GenRequest((1, 2, 1), 9, SamplingParams(repetition_penalty=1.5))
    rows = asked(LogitsRow(state_of(request, [2, 3, 3]), 0))
    assert seen(rows, 0) == {1: 0, 2: 1, 3: 2}


def test_a_row_after_guesses_counts_them_as_output() -> None:
    request = GenRequest((1,), 9, SamplingParams(frequency_penalty=0.5))
    state = state_of(request, [2], draft=[2, 4, 4])
    rows = asked(*(LogitsRow(state, guesses) for guesses in range(4)))
    assert [seen(rows, r) for r in range(4)] == [
        {1: 0, 2: 1},
        {1: 0, 2: 2},
        {1: 0, 2: 2, 4: 1},
        {1: 0, 2: 2, 4: 2},
    ]
    assert rows.draw_index.tolist() == [1, 2, 3, 4]


def test_counting_goes_on_where_it_ended() -> None:
    recorder = Recorder()
    sampler = Sampler(1, recorder)
    state = state_of(GenRequest((1,), 9, SamplingParams(presence_penalty=0.5)), [])
    for token in (3, 3, 5):
        sampler.sample(np.zeros((1, 8), np.float32), [LogitsRow(state, 0)])
        state.append(token)
    sampler.sample(np.zeros((1, 8), np.float32), [LogitsRow(state, 0)])
    assert seen(recorder.rows, 0) == {1: 0, 3: 2, 5: 1}


def test_requests_without_extras_cost_no_arrays() -> None:
    rows = asked(LogitsRow(state_of(GenRequest((1,), 9), [2]), 0))
    assert rows.seen_starts.tolist() == rows.bias_starts.tolist() == rows.banned_starts.tolist() == [0, 0]


def test_stop_ids_are_banned_row_by_row_until_min_tokens() -> None:
    request = GenRequest((1,), 9, stop_ids=frozenset({7, 5, 8, -1}), min_tokens=3)
    state = state_of(request, [2], draft=[2, 2])
    rows = asked(*(LogitsRow(state, guesses) for guesses in range(3)))
    assert rows.banned_starts.tolist() == [0, 2, 4, 4]
    assert rows.banned_tokens.tolist() == [5, 7, 5, 7]


def test_bias_belongs_to_its_row() -> None:
    biased = GenRequest((1,), 9, SamplingParams(logit_bias=((3, -100.0), (4, 2.5))))
    rows = asked(LogitsRow(state_of(GenRequest((1,), 9), []), 0), LogitsRow(state_of(biased, [], slot=1), 0))
    assert rows.bias_starts.tolist() == [0, 0, 2]
    assert rows.bias_tokens.tolist() == [3, 4]
    assert rows.bias_values.tolist() == [-100.0, 2.5]


@pytest.mark.parametrize("top_k", [-1, 0, 1, 16, 17, 2**31, 2**63])
def test_any_top_k_is_served(top_k: int) -> None:
    driver = Driver(ScriptedModel())
    request = GenRequest((1, 2), 5, SamplingParams(top_k=top_k), seed=3)
    mate = driver.add(GenRequest((1, 2), 5, SamplingParams(temperature=0.0)))
    tokens = driver.finish(request)
    assert len(tokens) == 5
    assert top_k != 1 or tokens == driver.tokens(mate)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.5),
        SamplingParams(logit_bias=((3, 4.0), (5, -100.0))),
    ],
    ids=repr,
)
def test_the_kernel_draws_what_the_reference_draws(params: SamplingParams) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (32, 40)).astype(np.float32)
    states = [state_of(GenRequest((1, 2, 3), 9, params, seed=seed), [4, 5], slot=seed) for seed in range(32)]
    rows = [LogitsRow(state, 0) for state in states]
    by_kernel = Sampler(32, sampling.sample).sample(logits.copy(), rows)
    by_reference = Sampler(32, reference_sampler.sample).sample(logits.copy(), rows)
    assert by_kernel.tokens.tolist() == by_reference.tokens.tolist()


def test_the_kernel_ends_a_request_whose_every_id_is_banned() -> None:
    bias = tuple((token, -100.0) for token in range(16))
    driver = Driver(ScriptedModel())
    request_id = driver.add(GenRequest((1, 2), 3, SamplingParams(logit_bias=bias)))
    driver.run()
    assert driver.drawn[request_id][-1].finish is FinishReason.LENGTH

"""Sampling against a naive version that sorts the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.naive import exp_as_kernels
from tlserve.kernels.philox import stream
from tlserve.kernels.sampling import MIN_LOGPROB, SamplingRows, sample

ONE = 1 << 40


def f32(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def i64(values: Any) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def rows_of(n: int, **changes: Any) -> SamplingRows:
    """n rows that draw from the plain distribution, with some arrays replaced."""
    none = np.zeros(0, np.int32)
    starts = np.zeros(n + 1, np.int64)
    rows = SamplingRows(
        temperature=np.ones(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        repetition=np.ones(n, np.float32),
        presence=np.zeros(n, np.float32),
        frequency=np.zeros(n, np.float32),
        seed=np.arange(n, dtype=np.int64),
        draw_index=np.zeros(n, np.int64),
        num_logprobs=np.full(n, -1, np.int32),
        seen_starts=starts,
        seen_tokens=none,
        seen_counts=none,
        bias_starts=starts,
        bias_tokens=none,
        bias_values=np.zeros(0, np.float32),
        banned_starts=starts,
        banned_tokens=none,
    )
    return rows._replace(**changes)


def naive_candidates(
    x: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], list[int]]:
    """Ids that may be drawn, in order of id, and the weight of every id: the rules of sampling.py, with a sort."""
    z = (x - x.max()) / np.float32(temperature)
    weights = [int(w) for w in np.rint(exp_as_kernels(z) * np.float32(ONE)).astype(np.int64)]
    ranked = [i for i in sorted(range(len(x)), key=lambda i: (-x[i], i)) if weights[i] > 0]
    if 0 < top_k < len(x):
        ranked = ranked[:top_k]
    if top_p < 1:
        least = max(1, math.ceil(float(np.float32(top_p)) * float(sum(weights[i] for i in ranked))))
        kept, mass = [], 0
        for i in ranked:
            if mass < least:
                kept.append(i)
                mass += weights[i]
        ranked = kept
    if min_p > 0:
        ranked = [i for i in ranked if weights[i] >= max(1, math.ceil(float(np.float32(min_p)) * ONE))]
    return sorted(ranked), weights


def naive_draw(x: NDArray[np.float32], u: float, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    ids, weights = naive_candidates(x, temperature, top_k, top_p, min_p)
    total = sum(weights[i] for i in ids)
    rest = min(int(u * float(total)), total - 1)
    for i in ids:
        if rest < weights[i]:
            return i
        rest -= weights[i]
    raise AssertionError("u < 1")


def logits_with_ties(seed: int, vocab_size: int, spread: float, step: float) -> NDArray[np.float32]:
    """Random logits; ``step`` > 0 rounds them so that many are equal."""
    x = np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)
    return (np.round(x / step) * step).astype(np.float32) if step else x


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 2**31),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 100, 1025, 3000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 2.5, 8.0, 100.0]),
    step=st.sampled_from([0.0, 0.5, 4.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_draw_is_that_of_a_sorted_vocabulary(
    seed: int,
    index: int,
    vocab_size: int,
    spread: float,
    step: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    x = logits_with_ties(abs(seed) % 1000, vocab_size, spread, step)
    expected = naive_draw(x, stream(seed, index), temperature, top_k, top_p, min_p)
    rows = rows_of(
        1,
        temperature=f32([temperature]),
        top_k=i32([top_k]),
        top_p=f32([top_p]),
        min_p=f32([min_p]),
        seed=i64([seed]),
        draw_index=i64([index]),
    )
    assert sample(x[None].copy(), rows).tokens.tolist() == [expected]


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_a_share_is_that_of_all_ids_however_little_each_weighs(top_p: float) -> None:
    """A sixteenth of the weight lies in a long tail."""
    x = f32([0.0] * 20 + [-8.4] * 6000)
    ids, _ = naive_candidates(x, 1.0, 0, top_p, 0.0)
    n = 400
    assert len(ids) <= 20
    assert set(sample(np.tile(x, (n, 1)), rows_of(n, top_p=f32([top_p] * n))).tokens.tolist()) == set(ids)


def naive_philox(key: int, counter: int) -> int:
    """Philox4x32-10 as its authors write it; the upper two words of the counter are 0."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[1] << 32 | c[0]


def test_naive_generator_gives_the_known_answer() -> None:
    """Of its authors' library, for zeros."""
    assert naive_philox(0, 0) == 0xE169C58D_6627E8D5


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 2**63 - 1))
@settings(deadline=None)
def test_stream_is_the_upper_53_bits_of_philox(seed: int, index: int) -> None:
    assert stream(seed, index) == (naive_philox(seed % 2**64, index) >> 11) / 2**53


def test_draws_follow_the_distribution() -> None:
    """A chi-square over 20,000 draws of one seed at successive indices."""
    n = 20_000
    x = np.tile(np.log(f32([0.5, 0.25, 0.125, 0.125])), (n, 1))
    rows = rows_of(n, seed=np.full(n, 7, np.int64), draw_index=np.arange(n, dtype=np.int64))
    counts = np.bincount(sample(x, rows).tokens, minlength=4)
    expected = n * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.999 quantile, 3 degrees of freedom


@pytest.mark.parametrize("vocab_size", [1, 16, 1000, 1024, 1025, 5000])
def test_greedy_takes_the_lowest_id_among_the_largest(vocab_size: int) -> None:
    x = logits_with_ties(vocab_size, vocab_size, 3.0, 1.0)
    rows = rows_of(1, temperature=f32([0]))
    assert sample(x[None].copy(), rows).tokens[0] == int(np.argmax(x))


def test_negative_zero_equals_zero() -> None:
    rows = rows_of(1, temperature=f32([0]))
    assert sample(f32([[-1, -0.0, 0.0]]), rows).tokens[0] == 1


def test_what_is_not_a_number_is_never_drawn() -> None:
    x = np.full((50, 40), np.nan, np.float32)
    x[:, 11] = 1
    x[:, 12] = -np.inf
    assert (sample(x, rows_of(50)).tokens == 11).all()


def test_infinite_logit_wins() -> None:
    x = np.zeros((2, 40), np.float32)
    x[:, 9] = np.inf
    rows = rows_of(2, temperature=f32([0, 1]), num_logprobs=i32([1, 1]))
    out = sample(x, rows)
    assert out.tokens.tolist() == [9, 9]
    assert np.isfinite(out.logprobs).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_id_banned_still_gives_a_token(temperature: float) -> None:
    rows = rows_of(
        1,
        temperature=f32([temperature]),
        top_p=f32([0.5]),
        num_logprobs=i32([2]),
        banned_starts=i64([0, 4]),
        banned_tokens=np.arange(4, dtype=np.int32),
    )
    out = sample(np.zeros((1, 4), np.float32), rows)
    assert out.tokens.tolist() == [0]
    np.testing.assert_allclose(out.logprobs, [math.log(0.25)], rtol=1e-6)


def test_logits_of_nothing_finite_give_finite_logprobs() -> None:
    out = sample(np.full((1, 20), -np.inf, np.float32), rows_of(1, num_logprobs=i32([3])))
    assert out.tokens.tolist() == [0]
    assert out.logprobs.tolist() == [MIN_LOGPROB]
    assert out.top_ids.tolist() == [[0, 1, 2]]
    assert out.top_logprobs.tolist() == [[MIN_LOGPROB] * 3]


def test_penalties_and_bias_apply_in_order() -> None:
    """Bias first, then repetition (divides what is positive), then frequency times count, then presence."""
    x = f32([[2.0, -2.0, 1.0, 3.0, 0.0]])
    rows = rows_of(
        1,
        temperature=f32([0]),
        repetition=f32([2.0]),
        presence=f32([0.25]),
        frequency=f32([0.5]),
        seen_starts=i64([0, 3]),
        seen_tokens=i32([0, 1, 3]),
        seen_counts=i32([3, 1, 0]),
        bias_starts=i64([0, 2]),
        bias_tokens=i32([0, 4]),
        bias_values=f32([4.0, 1.25]),
    )
    out = sample(x, rows)
    assert x.tolist() == [[3.0 - 1.5 - 0.25, -4.0 - 0.5 - 0.25, 1.0, 1.5, 1.25]]
    assert out.tokens.tolist() == [3]


def test_prompt_tokens_bear_repetition_only() -> None:
    x = f32([[1.0, 1.0]])
    rows = rows_of(
        1,
        presence=f32([2.0]),
        frequency=f32([2.0]),
        seen_starts=i64([0, 1]),
        seen_tokens=i32([0]),
        seen_counts=i32([0]),
    )
    sample(x, rows)
    assert x.tolist() == [[1.0, 1.0]]


def test_logprobs_are_those_of_the_model_whatever_the_request_changes() -> None:
    x = np.random.default_rng(0).normal(0, 4, (1, 777)).astype(np.float32)
    exact = x[0].astype(np.float64) - np.log(np.exp(x[0].astype(np.float64)).sum())
    rows = rows_of(
        1,
        temperature=f32([0.3]),
        num_logprobs=i32([5]),
        top_k=i32([1]),
        bias_starts=i64([0, 1]),
        bias_tokens=i32([700]),
        bias_values=f32([100]),
    )
    out = sample(x, rows)
    assert out.tokens.tolist() == [700]
    np.testing.assert_allclose(out.logprobs, exact[[700]], rtol=1e-5)
    best = np.argsort(-exact, kind="stable")[:5]
    assert out.top_ids.tolist() == [best.tolist()]
    np.testing.assert_allclose(out.top_logprobs[0], exact[best], rtol=1e-5)


def test_top_logprobs_break_ties_by_lowest_id() -> None:
    x = f32([[1, 5, 1, 5, 1, 5, 0]])
    out = sample(x, rows_of(1, num_logprobs=i32([5])))
    assert out.top_ids.tolist() == [[1, 3, 5, 0, 2]]


def test_more_logprobs_than_tokens_gives_them_all() -> None:
    out = sample(f32([[1, 2]]), rows_of(1, num_logprobs=i32([20])))
    assert out.top_ids.tolist() == [[1, 0]]


def test_rows_that_ask_for_fewer_logprobs_are_padded() -> None:
    out = sample(f32([[1, 2], [2, 1], [0, 0]]), rows_of(3, num_logprobs=i32([2, 1, -1])))
    assert out.top_ids.tolist() == [[1, 0], [0, -1], [-1, -1]]
    assert out.logprobs[2] == 0


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 0.001])
def test_tiny_temperature_takes_the_most_likely(temperature: float) -> None:
    x = logits_with_ties(3, 500, 5.0, 0.0)
    rows = rows_of(1, temperature=f32([temperature]), top_k=i32([40]), top_p=f32([0.9]))
    assert sample(x[None].copy(), rows).tokens[0] == int(np.argmax(x))


def test_a_row_does_not_depend_on_its_mates() -> None:
    n = 9
    x = np.random.default_rng(1).normal(0, 2, (n, 999)).astype(np.float32)
    together = sample(x.copy(), rows_of(n, num_logprobs=np.full(n, 3, np.int32)))
    for r in range(n):
        rows = rows_of(1, seed=i64([r]), num_logprobs=i32([3]))
        alone = sample(x[r : r + 1].copy(), rows)
        assert alone.tokens[0] == together.tokens[r]
        assert alone.logprobs.tobytes() == together.logprobs[r : r + 1].tobytes()
        assert alone.top_logprobs.tobytes() == together.top_logprobs[r : r + 1].tobytes()


def test_no_rows_give_no_tokens() -> None:
    assert sample(np.zeros((0, 10), np.float32), rows_of(0)).tokens.size == 0

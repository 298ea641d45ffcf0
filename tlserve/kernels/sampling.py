"""Draw one token from each row of logits, without sorting the vocabulary.

Order of operations: logit_bias, repetition, frequency and presence penalties, banned ids, temperature,
top_k, top_p, min_p, then one draw. A row depends on nothing but its own inputs.

Rules that make the result exact:

* Only numbers compare: NaN counts as -inf, +inf as the largest float, -0.0 as 0.0.
* A token's weight is ``round(2**40 * exp((logit - largest) / temperature))``, an integer. Sums of integers
  have no rounding, so a cut never depends on the order of summation. A token of weight 0 (a probability
  under 5e-13 of the most likely one's) is never drawn.
* Tokens rank by logit, equal logits by lowest id. top_k keeps the first k by rank; top_p the shortest
  run by rank that weighs at least ``ceil(top_p * total)``; min_p those of at least ``ceil(min_p * 2**40)``.
* The draw takes the first token, by id, whose running sum of kept weights passes ``floor(u * total)``,
  where u is ``stream(seed, index)``.
* Temperature 0 takes the first token by rank. When every id is banned the first id is taken.
* Log probabilities are those of the logits as they came in, and never below MIN_LOGPROB.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.jit import entry, jit
from tlserve.kernels.philox import stream
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.simd import (
    first_lanes,
    load_f32_first,
    mask_bits,
    max_lanes,
    maximum,
    minimum,
    select,
    splat,
    store_f32,
    store_f32_first,
    sum_lanes,
    to_bits,
)

Floats = NDArray[np.float32]
Table = NDArray[np.float32]
Weights = NDArray[np.int64]
Ids = NDArray[np.int32]

MIN_LOGPROB = np.float32(-9999.0)
MIN_TEMPERATURE = np.float32(1e-6)  # lower ones count as this: still greedy but for ties
LARGEST = np.finfo(np.float32).max
ONE = np.int64(1) << 40  # weight of the most likely token
HEAVY = np.int64(1) << 28  # a weight within 8 nats of the largest
NUM_BUCKETS = 2048
BUCKETS_PER_NAT = np.float32(72.0)  # weight 0 begins at 28.4 nats under the most likely token, inside the last bucket
LANES = 16
STRETCH = 1024  # tokens that are looked through together


class SamplingRows(NamedTuple):
    """What each of the n rows asks for. ``x_starts[r]:x_starts[r + 1]`` is the part of the ``x_*`` arrays of row r."""

    temperature: NDArray[np.float32]  # [n] 0 = greedy
    top_k: NDArray[np.int32]  # [n] 0 or less = off
    top_p: NDArray[np.float32]  # [n] 1 = off
    min_p: NDArray[np.float32]  # [n] 0 = off
    repetition: NDArray[np.float32]  # [n] 1 = off
    presence: NDArray[np.float32]  # [n] 0 = off
    frequency: NDArray[np.float32]  # [n] 0 = off
    seed: NDArray[np.int64]  # [n]
    draw_index: NDArray[np.int64]  # [n] index of the token being drawn, 0 = first generated
    num_logprobs: NDArray[np.int32]  # [n] -1 = none, 0 = the drawn token's own, k = and the k most likely
    seen_starts: NDArray[np.int64]  # [n + 1]
    seen_tokens: NDArray[np.int32]  # each id of prompt and output once
    seen_counts: NDArray[np.int32]  # times generated; 0 = in the prompt only
    bias_starts: NDArray[np.int64]  # [n + 1]
    bias_tokens: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    banned_starts: NDArray[np.int64]  # [n + 1]
    banned_tokens: NDArray[np.int32]  # ids that must not be drawn


class SampledTokens(NamedTuple):
    """One drawn token per row; log probabilities are 0 where none were asked for, ids past a row's k are -1."""

    tokens: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n] of the drawn token
    top_ids: NDArray[np.int32]  # [n, largest k] most likely first, ties by lowest id
    top_logprobs: NDArray[np.float32]  # [n, largest k]


class Scratch(NamedTuple):
    """Room that rows use one after the other."""

    raw: Floats  # [vocab_size] the logits as they came in
    powers: Floats  # [vocab_size + 16]
    weights: Weights  # [vocab_size]
    candidates: Ids  # [vocab_size + 1]
    border: Ids  # [vocab_size + 1]
    buckets: Weights  # [NUM_BUCKETS]
    maxima: Floats  # [ceil(vocab_size / STRETCH)] the largest logit of each stretch


def sample(logits: Floats, rows: SamplingRows) -> SampledTokens:
    """Draw one token per row of ``logits`` [n, vocab_size]; the logits are used up.

    One call that does not hold the GIL. Row r of the result depends on row r of the inputs only.
    """
    n, vocab_size = logits.shape
    widest = min(int(rows.num_logprobs.max(initial=0)), vocab_size)
    out = SampledTokens(
        tokens=np.empty(n, np.int32),
        logprobs=np.zeros(n, np.float32),
        top_ids=np.full((n, widest), -1, np.int32),
        top_logprobs=np.zeros((n, widest), np.float32),
    )
    _sample_rows(logits, rows, out, _scratch(vocab_size))
    return out


def _scratch(vocab_size: int) -> Scratch:
    return Scratch(
        raw=np.empty(vocab_size, np.float32),
        powers=np.empty(vocab_size + LANES, np.float32),
        weights=np.empty(vocab_size, np.int64),
        candidates=np.empty(vocab_size + 1, np.int32),
        border=np.empty(vocab_size + 1, np.int32),
        buckets=np.empty(NUM_BUCKETS, np.int64),
        maxima=np.empty((vocab_size + STRETCH - 1) // STRETCH, np.float32),
    )


# ---- one row ----

_F32, _I32, _I64 = types.float32[::1], types.int32[::1], types.int64[::1]
_named: Any = types.NamedTuple  # numba has no types
_ROWS = _named(
    [
        *[_F32, _I32, _F32, _F32, _F32, _F32, _F32, _I64, _I64, _I32],
        *[_I64, _I32, _I32, _I64, _I32, _F32, _I64, _I32],
    ],
    SamplingRows,
)
_OUT = _named([_I32, _F32, types.int32[:, ::1], types.float32[:, ::1]], SampledTokens)
_SCRATCH = _named([_F32, _F32, _I64, _I32, _I32, _I64, _F32], Scratch)


@entry(types.void(types.float32[:, ::1], _ROWS, _OUT, _SCRATCH))
def _sample_rows(logits: Table, rows: SamplingRows, out: SampledTokens, scratch: Scratch) -> None:
    for r in range(logits.shape[0]):
        x = logits[r]
        _make_comparable(x, scratch.maxima)
        wants_logprob = rows.num_logprobs[r] >= 0
        norm = 0.0
        if wants_logprob:
            for i in range(x.size):
                scratch.raw[i] = x[i]
            norm = _log_sum(x, scratch.maxima)
        if _penalise(x, rows, r):
            _make_comparable(x, scratch.maxima)
        token = _choose(x, rows, r, scratch)
        out.tokens[r] = token
        if wants_logprob:
            out.logprobs[r] = _logprob(scratch.raw[token], norm)
            _most_likely(scratch.raw, norm, min(rows.num_logprobs[r], x.size), out.top_ids[r], out.top_logprobs[r])


@jit
def _penalise(x: Floats, rows: SamplingRows, r: int) -> bool:
    """Everything that changes single logits; gives whether anything did."""
    for i in range(rows.bias_starts[r], rows.bias_starts[r + 1]):
        token = rows.bias_tokens[i]
        x[token] = _bounded(x[token] + rows.bias_values[i])
    for i in range(rows.seen_starts[r], rows.seen_starts[r + 1]):
        token = rows.seen_tokens[i]
        x[token] = _penalised(x[token], rows.seen_counts[i], rows.repetition[r], rows.presence[r], rows.frequency[r])
    for i in range(rows.banned_starts[r], rows.banned_starts[r + 1]):
        x[rows.banned_tokens[i]] = -np.inf
    return (
        rows.bias_starts[r] < rows.bias_starts[r + 1]
        or rows.seen_starts[r] < rows.seen_starts[r + 1]
        or rows.banned_starts[r] < rows.banned_starts[r + 1]
    )


@jit
def _choose(x: Floats, rows: SamplingRows, r: int, scratch: Scratch) -> int:
    first = _first_by_rank(x, scratch.maxima)
    if rows.temperature[r] <= 0 or x[first] == -np.inf:
        return first
    weights, candidates = scratch.weights, scratch.candidates
    top_k, top_p, min_p = np.int64(rows.top_k[r]), rows.top_p[r], rows.min_p[r]
    cuts_k = 0 < top_k < x.size
    temperature = max(rows.temperature[r], MIN_TEMPERATURE)
    total, num_heavy, heavy = _weigh(x, x[first], temperature, scratch.powers, weights)
    u = stream(rows.seed[r], rows.draw_index[r])
    if not cuts_k and top_p >= 1 and min_p <= 0:
        return _draw_any(weights, total, u)
    # Weights fall with the logits, but for the last bit of exp: where the heavy tokens suffice for a cut, no token
    # that weighs less than them by more than that can pass it.
    suffices = num_heavy >= top_k if cuts_k else top_p < 1 and heavy >= _share(top_p, total)
    kept = candidates[: _list(weights, HEAVY - (HEAVY >> 20) if suffices else np.int64(1), candidates)]
    scale = BUCKETS_PER_NAT / temperature
    if cuts_k:
        kept = kept[: _keep_top(x, x[first], scale, weights, False, top_k, kept, scratch)]
    if top_p < 1:
        least = _share(top_p, _sum(weights, kept) if cuts_k else total)  # kept may be the heavy ones alone
        kept = kept[: _keep_top(x, x[first], scale, weights, True, least, kept, scratch)]
    if min_p > 0:
        kept = kept[: _drop_light(weights, _share(min_p, ONE), kept)]
    return _draw(weights, kept, u)


@jit
def _bounded(value: float) -> float:
    """``value`` with NaN as -inf, +inf as the largest float and -0.0 as 0.0."""
    value = min(value, LARGEST) if value == value else np.float32(-np.inf)
    return value + np.float32(0.0)


@jit
def _make_comparable(x: Floats, maxima: Floats) -> None:
    """Bounds every logit, and finds the largest of each stretch."""
    lowest, highest, zero = splat(np.float32(-np.inf)), splat(LARGEST), splat(np.float32(0.0))
    for stretch in range(maxima.size):
        top = lowest
        for i in range(stretch * STRETCH, min((stretch + 1) * STRETCH, x.size), LANES):
            count = np.int32(min(LANES, x.size - i))
            values = load_f32_first(x, i, count)
            bounded = minimum(select(values == values, values, lowest), highest) + zero
            # Nearly always nothing changes, and the lines were written on another core.
            if mask_bits(to_bits(values) != to_bits(bounded)):
                store_f32_first(x, i, bounded, count)
            top = maximum(top, select(first_lanes(count), bounded, lowest))
        maxima[stretch] = max_lanes(top)


@jit
def _penalised(value: float, count: int, repetition: float, presence: float, frequency: float) -> float:
    value = value / repetition if value > 0 else value * repetition
    if count > 0:
        value = value - np.float32(count) * frequency - presence
    return _bounded(value)


@jit
def _best_stretch(maxima: Floats) -> int:
    """The first stretch that has the largest logit of all."""
    stretch = 0
    for i in range(1, maxima.size):
        if maxima[i] > maxima[stretch]:
            stretch = i
    return stretch


@jit
def _first_by_rank(x: Floats, maxima: Floats) -> int:
    """The lowest id among the largest logits."""
    stretch = _best_stretch(maxima)
    for i in range(stretch * STRETCH, x.size):
        if x[i] == maxima[stretch]:
            return i
    return 0


# ---- cuts and draws ----


@jit
def _weigh(x: Floats, largest: float, temperature: float, powers: Floats, weights: Weights) -> tuple[int, int, int]:
    """weights[i] = round(2**40 * exp((x[i] - largest) / temperature)); ``powers`` is scratch, 16 longer than x.

    Gives the sum of all, and how many heavy ones there are and their sum.
    """
    top, heat, one = splat(largest), splat(temperature), splat(np.float32(ONE))
    for i in range(0, x.size, LANES):
        part = load_f32_first(x, i, np.int32(min(LANES, x.size - i)))
        store_f32(powers, i, exp16((part - top) / heat) * one)
    total = num_heavy = heavy = np.int64(0)
    for i in range(x.size):
        weight = np.int64(np.rint(powers[i]))
        weights[i] = weight
        total += weight
        num_heavy += weight >= HEAVY
        heavy += weight if weight >= HEAVY else np.int64(0)
    return total, num_heavy, heavy


@jit
def _share(fraction: float, total: int) -> int:
    """The least integer that is at least this fraction of ``total``, but not 0."""
    return max(np.int64(1), np.int64(np.ceil(np.float64(fraction) * np.float64(total))))


@jit
def _list(weights: Weights, bound: int, candidates: Ids) -> int:
    """Lists the tokens that weigh at least ``bound``, by id; gives how many."""
    count = 0
    for i in range(weights.size):
        candidates[count] = i  # kept only where the count moves on: no branch to mispredict
        count += weights[i] >= bound
    return count


@jit
def _sum(weights: Weights, kept: Ids) -> int:
    total = np.int64(0)
    for t in kept:
        total += weights[t]
    return total


@jit
def _drop_light(weights: Weights, least: int, kept: Ids) -> int:
    """Lists anew those of ``kept`` that weigh at least ``least``; gives how many."""
    count = 0
    for t in kept:
        kept[count] = t
        count += weights[t] >= least
    return count


@jit
def _keep_top(
    x: Floats, largest: float, scale: float, weights: Weights, by_weight: bool, least: int, kept: Ids, scratch: Scratch
) -> int:
    """Lists anew the shortest run of ``kept``, by rank, that measures at least ``least``; gives how many.

    A token measures its weight, or with ``by_weight`` False 1. A histogram over the distance from the largest logit
    finds the bucket in which the run ends; its tokens alone are searched further.
    """
    buckets, border = scratch.buckets, scratch.border
    buckets[:] = 0
    for t in kept:
        buckets[_bucket(x[t], largest, scale)] += weights[t] if by_weight else 1
    last = 0
    while last < NUM_BUCKETS - 1 and buckets[last] < least:
        least -= buckets[last]
        last += 1
    count = 0
    for t in kept:
        border[count] = t
        count += _bucket(x[t], largest, scale) == last
    bits = x.view(np.int32)
    key, least = _last_key(bits, weights, by_weight, least, buckets, border[:count])
    count = 0
    for t in kept:
        bucket, own = _bucket(x[t], largest, scale), _unsigned_key(bits[t])
        stays = bucket < last or (bucket == last and (own > key or (own == key and least > 0)))
        if bucket == last and own == key:
            least -= weights[t] if by_weight else 1
        kept[count] = t
        count += stays
    return count


@jit
def _bucket(value: float, largest: float, scale: float) -> int:
    return min(np.int32((largest - value) * scale), np.int32(NUM_BUCKETS - 1))


@jit
def _unsigned_key(bits: int) -> int:
    """The bits of a float as a number from 0 on that compares as it does."""
    return np.int64(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))) + 2**31


@jit
def _last_key(
    bits: Ids, weights: Weights, by_weight: bool, least: int, buckets: Weights, border: Ids
) -> tuple[int, int]:
    """The key at which a run over ``border`` measures ``least``, by radix search, and what remains for its tokens."""
    key = np.int64(0)
    for shift in (24, 16, 8, 0):
        buckets[:256] = 0
        for t in border:
            own = _unsigned_key(bits[t])
            if own >> (shift + 8) == key:
                buckets[(own >> shift) & 255] += weights[t] if by_weight else 1
        digit = 255
        while digit > 0 and buckets[digit] < least:
            least -= buckets[digit]
            digit -= 1
        key = key << 8 | digit
    return key, least


@jit
def _draw(weights: Weights, kept: Ids, u: float) -> int:
    """The first of ``kept`` whose running sum of weights passes ``floor(u * total)``."""
    total = _sum(weights, kept)
    rest = min(np.int64(u * np.float64(total)), total - 1)
    for t in kept:
        if rest < weights[t]:
            return t
        rest -= weights[t]
    return kept[-1]  # not reached: rest < total


@jit
def _draw_any(weights: Weights, total: int, u: float) -> int:
    """The same over every token, a stretch at a time."""
    rest = min(np.int64(u * np.float64(total)), total - 1)
    for start in range(0, weights.size, STRETCH):
        stop = min(start + STRETCH, weights.size)
        stretch = np.int64(0)
        for i in range(start, stop):
            stretch += weights[i]
        if rest < stretch:
            for i in range(start, stop):
                if rest < weights[i]:
                    return i
                rest -= weights[i]
        rest -= stretch
    return weights.size - 1  # not reached: rest < total


# ---- log probabilities ----


@jit
def _log_sum(x: Floats, maxima: Floats) -> float:
    """log(sum(exp(x))), in f64 around the largest; -inf when nothing is finite."""
    largest = maxima[_best_stretch(maxima)]
    if largest == -np.inf:
        return np.float64(-np.inf)
    total, top = 0.0, splat(largest)
    for start in range(0, x.size, STRETCH):
        part = splat(np.float32(0.0))
        for i in range(start, min(start + STRETCH, x.size), LANES):
            count = np.int32(min(LANES, x.size - i))
            power = exp16(load_f32_first(x, i, count) - top)
            part = part + select(first_lanes(count), power, splat(np.float32(0.0)))
        total += np.float64(sum_lanes(part))
    return np.float64(largest) + np.log(total)


@jit
def _logprob(value: float, norm: float) -> float:
    difference = np.float32(np.float64(value) - norm)
    return difference if difference > MIN_LOGPROB else MIN_LOGPROB  # NaN, from -inf - -inf, too


@jit
def _most_likely(x: Floats, norm: float, k: int, ids: Ids, logprobs: Floats) -> None:
    """The first k tokens by rank, by insertion: a token enters only where it beats the k-th so far."""
    if k == 0:
        return
    count = 0
    for start in range(0, x.size, LANES):
        lanes = min(LANES, x.size - start)
        if count == k:
            beaten = splat(x[ids[k - 1]])
            if mask_bits(first_lanes(np.int32(lanes)) & (load_f32_first(x, start, np.int32(lanes)) > beaten)) == 0:
                continue
        for i in range(start, start + lanes):
            if count < k or x[i] > x[ids[k - 1]]:
                place = min(count, k - 1)
                while place > 0 and x[i] > x[ids[place - 1]]:
                    ids[place] = ids[place - 1]
                    place -= 1
                ids[place] = i
                count = min(count + 1, k)
    for i in range(k):
        logprobs[i] = _logprob(x[ids[i]], norm)

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

Random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3,
2011). The key is the request's seed, the counter the index of the token being drawn.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.jit import entry, jit
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.simd import first_lanes, load_f32_first, mask_bits, select, splat, store_f32, sum_lanes

Floats = NDArray[np.float32]
Table = NDArray[np.float32]
Weights = NDArray[np.int64]
Ids = NDArray[np.int32]

MIN_LOGPROB = np.float32(-9999.0)
MIN_TEMPERATURE = np.float32(1e-6)  # lower ones count as this: still greedy but for ties
LARGEST = np.finfo(np.float32).max
ONE = np.int64(1) << 40  # weight of the most likely token
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
    candidates: Ids  # [vocab_size]
    buckets: Weights  # [NUM_BUCKETS]


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
        candidates=np.empty(vocab_size, np.int32),
        buckets=np.empty(NUM_BUCKETS, np.int64),
    )


# ---- random numbers ----


@jit
def philox(seed: int, index: int) -> int:
    """The first two words of Philox4x32-10 with key ``seed`` and counter ``index``, as one 64-bit number."""
    key0, key1 = np.uint64(seed) & np.uint64(0xFFFFFFFF), np.uint64(seed) >> np.uint64(32)
    c0, c1 = np.uint64(index) & np.uint64(0xFFFFFFFF), np.uint64(index) >> np.uint64(32)
    c2 = c3 = np.uint64(0)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ key0,
            product1 & np.uint64(0xFFFFFFFF),
            (product0 >> np.uint64(32)) ^ c3 ^ key1,
            product0 & np.uint64(0xFFFFFFFF),
        )
        key0 = (key0 + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
        key1 = (key1 + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF)
    return (c1 << np.uint64(32)) | c0


@entry(types.float64(types.int64, types.int64))
def stream(seed: int, index: int) -> float:
    """The uniform number in [0, 1) that draws token ``index`` of a request with ``seed`` (int64 both)."""
    return np.float64(philox(seed, index) >> np.uint64(11)) * 2.0**-53


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
_SCRATCH = _named([_F32, _F32, _I64, _I32, _I64], Scratch)


@entry(types.void(types.float32[:, ::1], _ROWS, _OUT, _SCRATCH))
def _sample_rows(logits: Table, rows: SamplingRows, out: SampledTokens, scratch: Scratch) -> None:
    for r in range(logits.shape[0]):
        x = logits[r]
        _make_comparable(x)
        wants_logprob = rows.num_logprobs[r] >= 0
        if wants_logprob:
            for i in range(x.size):
                scratch.raw[i] = x[i]
        _penalise(x, rows, r)
        token = _choose(x, rows, r, scratch)
        out.tokens[r] = token
        if wants_logprob:
            norm = _log_sum(scratch.raw)
            out.logprobs[r] = _logprob(scratch.raw[token], norm)
            _most_likely(scratch.raw, norm, min(rows.num_logprobs[r], x.size), out.top_ids[r], out.top_logprobs[r])


@jit
def _penalise(x: Floats, rows: SamplingRows, r: int) -> None:
    for i in range(rows.bias_starts[r], rows.bias_starts[r + 1]):
        token = rows.bias_tokens[i]
        x[token] = _bounded(x[token] + rows.bias_values[i])
    for i in range(rows.seen_starts[r], rows.seen_starts[r + 1]):
        token = rows.seen_tokens[i]
        x[token] = _penalised(x[token], rows.seen_counts[i], rows.repetition[r], rows.presence[r], rows.frequency[r])
    for i in range(rows.banned_starts[r], rows.banned_starts[r + 1]):
        x[rows.banned_tokens[i]] = -np.inf


@jit
def _choose(x: Floats, rows: SamplingRows, r: int, scratch: Scratch) -> int:
    first = _first_by_rank(x)
    if rows.temperature[r] <= 0 or x[first] == -np.inf:
        return first
    temperature = max(rows.temperature[r], MIN_TEMPERATURE)
    weights = scratch.weights
    _weigh(x, x[first], temperature, scratch.powers, weights)
    if 0 < rows.top_k[r] < x.size:
        _keep_top(x, x[first], temperature, weights, False, np.int64(rows.top_k[r]), scratch)
    if rows.top_p[r] < 1:
        least = _share(rows.top_p[r], weights.sum())
        _keep_top(x, x[first], temperature, weights, True, least, scratch)
    if rows.min_p[r] > 0:
        _drop_below(weights, _share(rows.min_p[r], ONE))
    return _draw(weights, stream(rows.seed[r], rows.draw_index[r]))


@jit
def _bounded(value: float) -> float:
    """``value`` with NaN as -inf, +inf as the largest float and -0.0 as 0.0."""
    value = min(value, LARGEST) if value == value else np.float32(-np.inf)
    return value + np.float32(0.0)


@jit
def _make_comparable(x: Floats) -> None:
    for i in range(x.size):
        x[i] = _bounded(x[i])


@jit
def _penalised(value: float, count: int, repetition: float, presence: float, frequency: float) -> float:
    value = value / repetition if value > 0 else value * repetition
    if count > 0:
        value = value - np.float32(count) * frequency - presence
    return _bounded(value)


@jit
def _key(bits: int) -> int:
    """The bits of a float as an integer that compares as it does: integer maxima vectorise, those of floats do not."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@jit
def _first_by_rank(x: Floats) -> int:
    """The lowest id among the largest logits."""
    bits = x.view(np.int32)
    best = _key(bits[0])
    for i in range(1, bits.size):
        best = max(best, _key(bits[i]))
    for start in range(0, bits.size, STRETCH):
        stop = min(start + STRETCH, bits.size)
        found = 0
        for i in range(start, stop):
            found += _key(bits[i]) == best
        if found:
            for i in range(start, stop):
                if _key(bits[i]) == best:
                    return i
    return 0


@jit
def _weigh(x: Floats, largest: float, temperature: float, powers: Floats, weights: Weights) -> None:
    """weights[i] = round(2**40 * exp((x[i] - largest) / temperature)); ``powers`` is scratch, 16 longer than x."""
    top, heat, one = splat(largest), splat(temperature), splat(np.float32(ONE))
    for i in range(0, x.size, LANES):
        part = load_f32_first(x, i, np.int32(min(LANES, x.size - i)))
        store_f32(powers, i, exp16((part - top) / heat) * one)
    for i in range(x.size):
        weights[i] = np.int64(np.rint(powers[i]))


@jit
def _share(fraction: float, total: int) -> int:
    """The least integer that is at least this fraction of ``total``."""
    return max(np.int64(1), np.int64(np.ceil(np.float64(fraction) * np.float64(total))))


@jit
def _drop_below(weights: Weights, least: int) -> None:
    for i in range(weights.size):
        weights[i] = weights[i] if weights[i] >= least else 0


@jit
def _keep_top(
    x: Floats, largest: float, temperature: float, weights: Weights, by_weight: bool, least: int, scratch: Scratch
) -> None:
    """Zero the weights of all but the shortest run of tokens, by rank, that measures at least ``least``.

    A token measures its weight, or with ``by_weight`` False 1. The lightest tokens are set aside at once where the
    others suffice. Then a histogram over the distance from the largest logit finds the bucket in which the run ends;
    its tokens alone are searched further.
    """
    candidates, buckets = scratch.candidates, scratch.buckets
    count = _set_lightest_aside(weights, by_weight, least, candidates)
    scale = BUCKETS_PER_NAT / temperature
    buckets[:] = 0
    for t in candidates[:count]:
        buckets[_bucket(x[t], largest, scale)] += weights[t] if by_weight else 1
    last = 0
    while last < NUM_BUCKETS - 1 and buckets[last] < least:
        least -= buckets[last]
        last += 1
    rest = 0
    for t in candidates[:count]:
        bucket = _bucket(x[t], largest, scale)
        if bucket > last:
            weights[t] = 0
        elif bucket == last:
            candidates[rest] = t
            rest += 1
    _keep_top_candidates(x.view(np.int32), weights, by_weight, least, buckets, candidates[:rest])


@jit
def _measure(weights: Weights, by_weight: bool, bound: int) -> int:
    """How many weights are at least ``bound``, or what they sum to."""
    total = np.int64(0)
    if by_weight:
        for i in range(weights.size):
            total += weights[i] if weights[i] >= bound else np.int64(0)
    else:
        for i in range(weights.size):
            total += weights[i] >= bound
    return total


@jit
def _set_lightest_aside(weights: Weights, by_weight: bool, least: int, candidates: Ids) -> int:
    """Zero all weights under the largest of a few bounds above which the tokens suffice; list the others, by id.

    Weights fall with the logits, so no token that is set aside ranks above one that is kept.
    """
    bound = ONE >> 10
    while bound > 1 and _measure(weights, by_weight, bound) < least:
        bound = bound >> 8 if bound > 1 << 8 else np.int64(1)
    count = 0
    for i in range(weights.size):
        candidates[count] = i  # kept only where the count moves on: no branch to mispredict
        count += weights[i] >= bound
    for i in range(weights.size):
        weights[i] = weights[i] if weights[i] >= bound else 0
    return count


@jit
def _bucket(value: float, largest: float, scale: float) -> int:
    return min(np.int32((largest - value) * scale), np.int32(NUM_BUCKETS - 1))


@jit
def _keep_top_candidates(
    bits: Ids, weights: Weights, by_weight: bool, least: int, buckets: Weights, candidates: Ids
) -> None:
    """As _keep_top, over ``candidates`` alone, exactly: a radix search for the key at which the run ends."""
    key = np.int64(0)
    for shift in (24, 16, 8, 0):
        buckets[:256] = 0
        for t in candidates:
            unsigned = np.int64(_key(bits[t])) + 2**31
            if unsigned >> (shift + 8) == key:
                buckets[(unsigned >> shift) & 255] += weights[t] if by_weight else 1
        digit = 255
        while digit > 0 and buckets[digit] < least:
            least -= buckets[digit]
            digit -= 1
        key = key << 8 | digit
    for t in candidates:
        unsigned = np.int64(_key(bits[t])) + 2**31
        if unsigned < key or (unsigned == key and least <= 0):
            weights[t] = 0
        elif unsigned == key:
            least -= weights[t] if by_weight else 1


@jit
def _draw(weights: Weights, u: float) -> int:
    """The first id whose running sum of weights passes ``floor(u * total)``."""
    total = weights.sum()
    rest = min(np.int64(u * np.float64(total)), total - 1)
    for start in range(0, weights.size, STRETCH):
        stop = min(start + STRETCH, weights.size)
        stretch = weights[start:stop].sum()
        if rest < stretch:
            for i in range(start, stop):
                if rest < weights[i]:
                    return i
                rest -= weights[i]
        rest -= stretch
    return weights.size - 1  # not reached: rest < total


@jit
def _log_sum(x: Floats) -> float:
    """log(sum(exp(x))), in f64 around the largest; -inf when nothing is finite."""
    largest = x[_first_by_rank(x)]
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

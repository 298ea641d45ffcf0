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

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.jit import entry, jit
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.simd import load_f32, store_f32

MIN_LOGPROB = np.float32(-9999.0)
MIN_TEMPERATURE = np.float32(1e-6)  # lower ones count as this: still greedy but for ties
LARGEST = np.finfo(np.float32).max
ONE = np.int64(1) << 40  # weight of the most likely token
NUM_BUCKETS = 2048
BUCKETS_PER_NAT = np.float32(72.0)  # weight 0 begins at 28.4 nats under the most likely token, inside the last bucket
LANES = 16
STRETCH = 1024  # tokens that are looked through together


@dataclass(frozen=True, slots=True)
class SamplingRows:
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


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One drawn token per row; log probabilities are 0 where none were asked for, ids past a row's k are -1."""

    tokens: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n] of the drawn token
    top_ids: NDArray[np.int32]  # [n, largest k] most likely first, ties by lowest id
    top_logprobs: NDArray[np.float32]  # [n, largest k]


def sample(logits: NDArray[np.float32], rows: SamplingRows) -> SampledTokens:
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
    _sample_rows(
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.repetition,
        rows.presence,
        rows.frequency,
        rows.seed,
        rows.draw_index,
        rows.num_logprobs,
        rows.seen_starts,
        rows.seen_tokens,
        rows.seen_counts,
        rows.bias_starts,
        rows.bias_tokens,
        rows.bias_values,
        rows.banned_starts,
        rows.banned_tokens,
        out.tokens,
        out.logprobs,
        out.top_ids,
        out.top_logprobs,
    )
    return out


@jit
def philox(seed, index):
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
def stream(seed, index):
    """The uniform number in [0, 1) that draws token ``index`` of a request with ``seed`` (int64 both)."""
    return np.float64(philox(seed, index) >> np.uint64(11)) * 2.0**-53


_F32, _I32, _I64 = types.float32[::1], types.int32[::1], types.int64[::1]


@entry(
    types.void(
        types.float32[:, ::1],
        *(_F32, _I32, _F32, _F32, _F32, _F32, _F32, _I64, _I64, _I32),
        *(_I64, _I32, _I32),
        *(_I64, _I32, _F32),
        *(_I64, _I32),
        *(_I32, _F32, types.int32[:, ::1], types.float32[:, ::1]),
    )
)
def _sample_rows(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    seed,
    draw_index,
    num_logprobs,
    seen_starts,
    seen_tokens,
    seen_counts,
    bias_starts,
    bias_tokens,
    bias_values,
    banned_starts,
    banned_tokens,
    tokens,
    logprobs,
    top_ids,
    top_logprobs,
):
    vocab_size = logits.shape[1]
    weights = np.empty(vocab_size, np.int64)
    candidates = np.empty(vocab_size, np.int32)
    buckets = np.empty(NUM_BUCKETS, np.int64)
    for r in range(logits.shape[0]):
        x = logits[r]
        _make_comparable(x)
        wants_logprob = num_logprobs[r] >= 0
        raw = x.copy() if wants_logprob else x
        for i in range(bias_starts[r], bias_starts[r + 1]):
            x[bias_tokens[i]] = _bounded(x[bias_tokens[i]] + bias_values[i])
        for i in range(seen_starts[r], seen_starts[r + 1]):
            t = seen_tokens[i]
            x[t] = _penalised(x[t], seen_counts[i], repetition[r], presence[r], frequency[r])
        for i in range(banned_starts[r], banned_starts[r + 1]):
            x[banned_tokens[i]] = -np.inf
        token = _first_by_rank(x)
        largest = x[token]
        if temperature[r] > 0 and largest > -np.inf:
            heat = max(temperature[r], MIN_TEMPERATURE)
            _weigh(x, largest, heat, weights)
            if 0 < top_k[r] < vocab_size:
                _keep_top(x, largest, heat, weights, False, np.int64(top_k[r]), buckets, candidates)
            if top_p[r] < 1:
                least = _share(top_p[r], weights.sum())
                _keep_top(x, largest, heat, weights, True, least, buckets, candidates)
            if min_p[r] > 0:
                _drop_below(weights, _share(min_p[r], ONE))
            token = _draw(weights, stream(seed[r], draw_index[r]))
        tokens[r] = token
        if wants_logprob:
            norm = _log_sum(raw)
            logprobs[r] = _logprob(raw[token], norm)
            _most_likely(raw, norm, min(num_logprobs[r], vocab_size), top_ids[r], top_logprobs[r])


@jit
def _bounded(value):
    """``value`` with NaN as -inf, +inf as the largest float and -0.0 as 0.0."""
    value = min(value, LARGEST) if value == value else np.float32(-np.inf)
    return value + np.float32(0.0)


@jit
def _make_comparable(x):
    for i in range(x.size):
        x[i] = _bounded(x[i])


@jit
def _penalised(value, count, repetition, presence, frequency):
    value = value / repetition if value > 0 else value * repetition
    if count > 0:
        value = value - np.float32(count) * frequency - presence
    return _bounded(value)


@jit
def _key(bits):
    """The bits of a float as an integer that compares as the float does (integer maxima vectorise, float ones don't)."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@jit
def _first_by_rank(x):
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
def _weigh(x, largest, temperature, weights):
    """weights[i] = round(2**40 * exp((x[i] - largest) / temperature))"""
    part = np.empty(LANES, np.float32)
    for start in range(0, x.size, LANES):
        count = min(LANES, x.size - start)
        for i in range(count):
            part[i] = (x[start + i] - largest) / temperature
        store_f32(part, 0, exp16(load_f32(part, 0)))
        for i in range(count):
            weights[start + i] = np.int64(np.rint(part[i] * np.float32(ONE)))


@jit
def _share(fraction, total):
    """The least integer that is at least this fraction of ``total``."""
    return max(np.int64(1), np.int64(np.ceil(np.float64(fraction) * np.float64(total))))


@jit
def _drop_below(weights, least):
    for i in range(weights.size):
        weights[i] = weights[i] if weights[i] >= least else 0


@jit
def _keep_top(x, largest, temperature, weights, by_weight, least, buckets, candidates):
    """Zero the weights of all but the shortest run of tokens, by rank, that measures at least ``least``.

    A token measures its weight, or with ``by_weight`` False 1. A histogram over the distance from the
    largest logit finds the bucket in which the run ends; its tokens alone are searched further.
    """
    scale = BUCKETS_PER_NAT / temperature
    buckets[:] = 0
    for i in range(x.size):
        if weights[i] > 0:
            buckets[_bucket(x[i], largest, scale)] += weights[i] if by_weight else 1
    last = 0
    while last < NUM_BUCKETS - 1 and buckets[last] < least:
        least -= buckets[last]
        last += 1
    count = 0
    for i in range(x.size):
        if weights[i] > 0:
            bucket = _bucket(x[i], largest, scale)
            if bucket > last:
                weights[i] = 0
            elif bucket == last:
                candidates[count] = i
                count += 1
    _keep_top_candidates(x.view(np.int32), weights, by_weight, least, buckets, candidates[:count])


@jit
def _bucket(value, largest, scale):
    return min(np.int32((largest - value) * scale), np.int32(NUM_BUCKETS - 1))


@jit
def _keep_top_candidates(bits, weights, by_weight, least, buckets, candidates):
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
def _draw(weights, u):
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
def _log_sum(x):
    """log(sum(exp(x))), in f64 around the largest; -inf when nothing is finite."""
    largest = x[_first_by_rank(x)]
    if largest == -np.inf:
        return np.float64(-np.inf)
    part = np.empty(LANES, np.float32)
    total = 0.0
    for start in range(0, x.size, LANES):
        count = min(LANES, x.size - start)
        part[:] = -np.inf
        for i in range(count):
            part[i] = x[start + i] - largest
        store_f32(part, 0, exp16(load_f32(part, 0)))
        for i in range(LANES):
            total += part[i]
    return np.float64(largest) + np.log(total)


@jit
def _logprob(value, norm):
    difference = np.float32(np.float64(value) - norm)
    return difference if difference > MIN_LOGPROB else MIN_LOGPROB  # NaN, from -inf - -inf, too


@jit
def _most_likely(x, norm, k, ids, logprobs):
    """The first k tokens by rank, by insertion: a token enters only where it beats the k-th so far."""
    if k == 0:
        return
    count = 0
    for i in range(x.size):
        if count == k and not x[i] > x[ids[k - 1]]:
            continue
        place = min(count, k - 1)
        while place > 0 and x[i] > x[ids[place - 1]]:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = i
        count = min(count + 1, k)
    for i in range(k):
        logprobs[i] = _logprob(x[ids[i]], norm)

"""Sampling and generation in the most obvious way: one row, one token, a sorted vocabulary, no cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.fakes import ScriptedModel
from tlserve.engine.request import FinishReason, GenRequest
from tlserve.kernels.sampling import MIN_LOGPROB, ONE, SampledTokens, SamplingRows

MASK32 = 0xFFFFFFFF


def stream(seed: int, index: int) -> float:
    """Philox4x32-10 as published: key = seed, counter = index; the first two words give 53 bits."""
    key = [seed & MASK32, (seed >> 32) & MASK32]
    c = [index & MASK32, (index >> 32) & MASK32, 0, 0]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(product1 >> 32) ^ c[1] ^ key[0], product1 & MASK32, (product0 >> 32) ^ c[3] ^ key[1], product0 & MASK32]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    return ((c[1] << 32 | c[0]) >> 11) * 2.0**-53


def sample(logits: NDArray[np.float32], rows: SamplingRows) -> SampledTokens:
    """The kernel's ``sample``, row by row."""
    num_rows, vocab_size = logits.shape
    width = min(int(rows.num_logprobs.max(initial=0)), vocab_size)
    out = SampledTokens(
        tokens=np.zeros(num_rows, np.int32),
        logprobs=np.zeros(num_rows, np.float32),
        top_ids=np.full((num_rows, width), -1, np.int32),
        top_logprobs=np.zeros((num_rows, width), np.float32),
    )
    for r in range(num_rows):
        out.tokens[r] = token = _draw(_adjusted(logits[r], rows, r), rows, r)
        if rows.num_logprobs[r] >= 0:
            logprobs = _log_softmax(logits[r])
            top = by_rank(logits[r])[: rows.num_logprobs[r]]
            out.logprobs[r] = logprobs[token]
            out.top_ids[r, : len(top)] = top
            out.top_logprobs[r, : len(top)] = logprobs[top]
    return out


def by_rank(logits: NDArray[np.float32]) -> list[int]:
    """All ids, the largest logit first, equal ones by lowest id."""
    return sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))


def _adjusted(logits: NDArray[np.float32], rows: SamplingRows, r: int) -> NDArray[np.float32]:
    x = logits.copy()
    for i in range(rows.bias_starts[r], rows.bias_starts[r + 1]):
        x[rows.bias_tokens[i]] += rows.bias_values[i]
    for i in range(rows.seen_starts[r], rows.seen_starts[r + 1]):
        token, count = rows.seen_tokens[i], rows.seen_counts[i]
        x[token] = x[token] / rows.repetition[r] if x[token] > 0 else x[token] * rows.repetition[r]
        if count:
            x[token] = x[token] - np.float32(count) * rows.frequency[r] - rows.presence[r]
    x[rows.banned_tokens[rows.banned_starts[r] : rows.banned_starts[r + 1]]] = -np.inf
    return x


def _draw(x: NDArray[np.float32], rows: SamplingRows, r: int) -> int:
    order = by_rank(x)
    largest = float(x[order[0]])
    if rows.temperature[r] == 0 or largest == -math.inf:
        return order[0]
    weights = {t: round(int(ONE) * math.exp((float(x[t]) - largest) / float(rows.temperature[r]))) for t in order}
    if rows.top_k[r] > 0:
        weights = {t: weights[t] for t in order[: rows.top_k[r]]}
    if rows.top_p[r] < 1:
        weights = _nucleus(weights, max(1, math.ceil(float(rows.top_p[r]) * sum(weights.values()))))
    if rows.min_p[r] > 0:
        least = math.ceil(float(rows.min_p[r]) * int(ONE))
        weights = {t: weight for t, weight in weights.items() if weight >= least}
    rest = int(stream(int(rows.seed[r]), int(rows.draw_index[r])) * sum(weights.values()))
    for token in sorted(weights):
        if rest < weights[token]:
            return token
        rest -= weights[token]
    raise AssertionError("the draw is smaller than the sum of weights")


def _nucleus(weights: dict[int, int], least: int) -> dict[int, int]:
    kept: dict[int, int] = {}
    for token, weight in weights.items():
        if sum(kept.values()) >= least:
            break
        kept[token] = weight
    return kept


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    x = logits.astype(np.float64)
    log_sum = float(x.max()) + math.log(math.fsum(np.exp(x - x.max()).tolist()))
    return np.maximum(x - log_sum, MIN_LOGPROB).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token of the reference: what a TokenOut must say."""

    token: int
    finish: FinishReason | None
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]


def generate(model: ScriptedModel, request: GenRequest) -> list[Drawn]:
    """All that a request alone gives, from a model without blocks."""
    tokens = list(request.prompt)
    drawn: list[Drawn] = []
    while not drawn or drawn[-1].finish is None:
        sampled = sample(model.logits_after(tokens)[np.newaxis], _row_of(request, tokens))
        token = int(sampled.tokens[0])
        tokens.append(token)
        finish = FinishReason.LENGTH if len(tokens) == len(request.prompt) + request.max_tokens else None
        finish = FinishReason.STOP if token in request.stop_ids else finish
        if request.params.num_logprobs is None:
            drawn.append(Drawn(token, finish, None, ()))
        else:
            top = zip(sampled.top_ids[0].tolist(), sampled.top_logprobs[0].tolist(), strict=True)
            drawn.append(Drawn(token, finish, float(sampled.logprobs[0]), tuple(top)))
    return drawn


def _row_of(request: GenRequest, tokens: list[int]) -> SamplingRows:
    params = request.params
    output = tokens[len(request.prompt) :]
    seen = sorted(set(tokens))
    bias = list(params.logit_bias)
    banned = sorted(request.stop_ids) if len(output) < request.min_tokens else []
    return SamplingRows(
        temperature=np.array([params.temperature], np.float32),
        top_k=np.array([params.top_k], np.int32),
        top_p=np.array([params.top_p], np.float32),
        min_p=np.array([params.min_p], np.float32),
        repetition=np.array([params.repetition_penalty], np.float32),
        presence=np.array([params.presence_penalty], np.float32),
        frequency=np.array([params.frequency_penalty], np.float32),
        seed=np.array([request.seed], np.int64),
        draw_index=np.array([len(output)], np.int64),
        num_logprobs=np.array([-1 if params.num_logprobs is None else params.num_logprobs], np.int32),
        seen_starts=np.array([0, len(seen)], np.int64),
        seen_tokens=np.array(seen, np.int32),
        seen_counts=np.array([output.count(token) for token in seen], np.int32),
        bias_starts=np.array([0, len(bias)], np.int64),
        bias_tokens=np.array([token for token, _ in bias], np.int32),
        bias_values=np.array([value for _, value in bias], np.float32),
        banned_starts=np.array([0, len(banned)], np.int64),
        banned_tokens=np.array(banned, np.int32),
    )

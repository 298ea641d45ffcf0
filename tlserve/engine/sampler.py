"""What each row of logits is to be drawn with, as the arrays that the sampling kernel reads."""

# Rule: the row after the i-th guess of a draft is prepared as if the guesses up to it were output: its draw has the
# index, its penalties the counts and its banned ids the state that it would have had in a step of its own.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tlserve.engine.state import RequestState
from tlserve.kernels.sampling import SampledTokens, SamplingRows

Value = TypeVar("Value", bound=np.generic)
SampleFunction = Callable[[NDArray[np.float32], SamplingRows], SampledTokens]

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_LARGEST_INT32 = 2**31 - 1


class LogitsRow(NamedTuple):
    """The row of logits after the known tokens and the first ``num_guesses`` of the draft of a request."""

    state: RequestState
    num_guesses: int


class SeenTokens:
    """Each id of a request's prompt and output once, with the times that it was generated."""

    def __init__(self, max_tokens: int) -> None:
        self._ids = np.zeros(max_tokens, np.int32)
        self._counts = np.zeros(max_tokens, np.int32)
        self._place: dict[int, int] = {}
        self._num_tokens = 0

    def catch_up(self, state: RequestState) -> None:
        """Count what was added since the last call; output stays output whatever the request went through."""
        for place in range(self._num_tokens, state.num_tokens):
            self._count(int(state.tokens[place]), 1 if place >= state.num_prompt_tokens else 0)
        self._num_tokens = state.num_tokens

    def with_guesses(self, guesses: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids and their counts, where ``guesses`` count as generated. Valid until the next ``catch_up``."""
        size = len(self._place)
        ids, counts = self._ids[:size], self._counts[:size]
        if not guesses:
            return ids, counts
        counts = counts.copy()
        added: dict[int, int] = {}
        for token in guesses:
            if token in self._place:
                counts[self._place[token]] += 1
            else:
                added[token] = added.get(token, 0) + 1
        new_ids, new_counts = np.array(list(added), np.int32), np.array(list(added.values()), np.int32)
        return np.concatenate([ids, new_ids]), np.concatenate([counts, new_counts])

    def _count(self, token: int, times: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        self._ids[place] = token
        self._counts[place] += times


class _SlotParams:
    """The parameters of each running request as columns, so that a step gathers them with one index."""

    def __init__(self, num_slots: int) -> None:
        self.owners: list[RequestState | None] = [None] * num_slots
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.zeros(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.repetition = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.zeros(num_slots, np.int32)
        self.seen: list[SeenTokens | None] = [None] * num_slots  # of a request with penalties
        self.bias = [(_NO_IDS, _NO_VALUES)] * num_slots
        self.stop_ids = [_NO_IDS] * num_slots  # of a request with min_tokens

    def fill(self, state: RequestState, vocab_size: int) -> None:
        slot, request, params = state.slot, state.request, state.request.params
        self.owners[slot] = state
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(max(params.top_k, 0), _LARGEST_INT32)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = request.seed
        self.num_logprobs[slot] = -1 if params.num_logprobs is None else params.num_logprobs
        has_penalty = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.seen[slot] = SeenTokens(len(state.tokens)) if has_penalty else None
        bias_ids = np.array([token for token, _ in params.logit_bias], np.int32)
        bias_values = np.array([value for _, value in params.logit_bias], np.float32)
        self.bias[slot] = (bias_ids, bias_values)
        # A tokenizer may name an EOS that the model has no logit for.
        bannable = sorted(token for token in request.stop_ids if 0 <= token < vocab_size)
        self.stop_ids[slot] = np.array(bannable if request.min_tokens else [], np.int32)


class Sampler:
    """Draws the next token of each row."""

    def __init__(self, num_slots: int, sample: SampleFunction) -> None:
        self._params = _SlotParams(num_slots)
        self._sample = sample

    def sample(self, logits: NDArray[np.float32], rows: Sequence[LogitsRow]) -> SampledTokens:
        """One token per row of ``logits`` [num_rows, vocab_size], which are used up."""
        params = self._params
        for state, _ in rows:
            if params.owners[state.slot] is not state:
                params.fill(state, logits.shape[1])
        slots = np.array([state.slot for state, _ in rows], np.intp)
        seen_starts, seen_tokens, seen_counts = _ragged([self._seen(row) for row in rows], _NO_IDS)
        bias_starts, bias_tokens, bias_values = _ragged([params.bias[state.slot] for state, _ in rows], _NO_VALUES)
        banned_starts, banned_tokens, _ = _ragged([(self._banned(row), _NO_IDS) for row in rows], _NO_IDS)
        return self._sample(
            logits,
            SamplingRows(
                temperature=params.temperature[slots],
                top_k=params.top_k[slots],
                top_p=params.top_p[slots],
                min_p=params.min_p[slots],
                repetition=params.repetition[slots],
                presence=params.presence[slots],
                frequency=params.frequency[slots],
                seed=params.seed[slots],
                draw_index=np.array([state.num_output_tokens + guesses for state, guesses in rows], np.int64),
                num_logprobs=params.num_logprobs[slots],
                seen_starts=seen_starts,
                seen_tokens=seen_tokens,
                seen_counts=seen_counts,
                bias_starts=bias_starts,
                bias_tokens=bias_tokens,
                bias_values=bias_values,
                banned_starts=banned_starts,
                banned_tokens=banned_tokens,
            ),
        )

    def _seen(self, row: LogitsRow) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        seen = self._params.seen[row.state.slot]
        if seen is None:
            return _NO_IDS, _NO_IDS
        seen.catch_up(row.state)
        return seen.with_guesses(row.state.draft[: row.num_guesses].tolist())

    def _banned(self, row: LogitsRow) -> NDArray[np.int32]:
        is_early = row.state.num_output_tokens + row.num_guesses < row.state.request.min_tokens
        return self._params.stop_ids[row.state.slot] if is_early else _NO_IDS


def _ragged(
    rows: Sequence[tuple[NDArray[np.int32], NDArray[Value]]], no_values: NDArray[Value]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Value]]:
    """Join rows of (ids, values) of different lengths: row r is [starts[r], starts[r + 1]) of both."""
    starts = np.zeros(len(rows) + 1, np.int64)
    if not any(len(ids) for ids, _ in rows):
        return starts, _NO_IDS, no_values
    np.cumsum([len(ids) for ids, _ in rows], out=starts[1:])
    return starts, np.concatenate([ids for ids, _ in rows]), np.concatenate([values for _, values in rows])

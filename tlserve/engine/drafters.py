"""Where drafts come from. A draft can cost or save time; what is drawn never depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlserve.engine.sampler import LogitsRow, SampleFunction, Sampler
from tlserve.engine.speculative import DraftLength, NgramIndex
from tlserve.engine.state import RequestState
from tlserve.engine.step_batch import BatchBuilder, Model, Piece


class Drafter(Protocol):
    def plan(self, state: RequestState, longest: int) -> int:
        """How many tokens to draft for a request in this step, 0 to ``longest``. Asked once a step."""
        ...

    def fill(self, requests: Sequence[RequestState]) -> None:
        """Write the drafts of all scheduled requests; may make ``num_draft_tokens`` smaller."""
        ...

    def record(self, state: RequestState, num_accepted: int) -> None:
        """Learn how the draft of this step fared, after the request has taken its tokens."""
        ...


class NoDrafter:
    """Speculation is off."""

    def plan(self, state: RequestState, longest: int) -> int:
        return 0

    def fill(self, requests: Sequence[RequestState]) -> None:
        return None

    def record(self, state: RequestState, num_accepted: int) -> None:
        return None


class PromptLookup:
    """Drafts what followed the last few tokens where they occurred before, in the prompt or the output."""

    def __init__(self, *, num_tokens: int, ngram_min: int, ngram_max: int) -> None:
        self._num_tokens = num_tokens
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max

    def plan(self, state: RequestState, longest: int) -> int:
        if state.draft_length is None or state.ngrams is None:
            state.draft_length = DraftLength(self._num_tokens)
            state.ngrams = NgramIndex(shortest=self._ngram_min, longest=self._ngram_max)
        state.ngrams.extend(state.tokens[len(state.ngrams) : state.num_tokens].tolist())
        draft = state.ngrams.continuation(min(state.draft_length.next(), longest))
        draft = draft[: _length_to_stop(draft, state)]
        state.tokens[state.num_tokens : state.num_tokens + len(draft)] = draft
        return len(draft)

    def fill(self, requests: Sequence[RequestState]) -> None:
        return None  # known since ``plan``

    def record(self, state: RequestState, num_accepted: int) -> None:
        assert state.draft_length is not None
        state.draft_length.record(state.num_draft_tokens, num_accepted)


class DraftModel:
    """Drafts what a smaller model draws with the same parameters and the same random numbers.

    Its keys and values live under the target's block ids. A request that does not draft lets it fall behind by
    up to a block; a block that is shared early may therefore hold nothing of it yet, which costs a guess at most.
    """

    def __init__(
        self,
        model: Model,
        sample: SampleFunction,
        block_tables: NDArray[np.int32],
        *,
        num_tokens: int,
        max_batch_tokens: int,
    ) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._max_batch_tokens = max_batch_tokens
        self._sampler = Sampler(len(block_tables), sample)
        self._batches = BatchBuilder(block_tables, max_batch_tokens=max_batch_tokens, max_model_len=model.max_model_len)

    def plan(self, state: RequestState, longest: int) -> int:
        if state.draft_length is None:
            state.draft_length = DraftLength(self._num_tokens)
        fitting = self._model.max_model_len - state.num_tokens
        return max(0, min(state.draft_length.next(), longest, fitting))

    def fill(self, requests: Sequence[RequestState]) -> None:
        self._catch_up(requests)
        drafting = [state for state in requests if state.num_draft_tokens > 1]
        for num_guesses in range(1, self._num_tokens):
            drafting = [state for state in drafting if state.num_draft_tokens > num_guesses]
            last = [state.num_tokens + num_guesses for state in drafting]
            pieces = [Piece(state, end - 1, end, 1) for state, end in zip(drafting, last, strict=True)]
            self._run(pieces, num_guesses)

    def record(self, state: RequestState, num_accepted: int) -> None:
        assert state.draft_length is not None
        state.draft_length.record(state.num_draft_tokens, num_accepted)
        state.num_draft_computed = min(state.num_draft_computed, state.num_computed_tokens)

    def _catch_up(self, requests: Sequence[RequestState]) -> None:
        """Compute what the model has not seen yet, with the first guess of those who draft."""
        pieces: list[Piece] = []
        budget = self._max_batch_tokens
        for state in requests:
            end = min(state.num_computed_tokens + state.num_scheduled_tokens, self._model.max_model_len)
            start = state.num_draft_computed
            if state.is_pooling or (not state.num_draft_tokens and end - start < self._model.block_size):
                continue
            while start < end:
                stop = min(end, start + budget)
                pieces.append(Piece(state, start, stop, 1 if state.num_draft_tokens and stop == end else 0))
                budget -= stop - start
                start = stop
                if budget == 0:
                    self._run(pieces, 0)
                    pieces, budget = [], self._max_batch_tokens
        self._run(pieces, 0)

    def _run(self, pieces: list[Piece], num_guesses: int) -> None:
        """Compute the pieces and draw guess number ``num_guesses`` of each whose logits are wanted."""
        if not pieces:
            return
        output = self._model.forward(self._batches.build(pieces))
        for piece in pieces:
            piece.state.num_draft_computed = piece.stop
        drafting = [piece.state for piece in pieces if piece.num_logits]
        if not drafting:
            return
        drawn = self._sampler.sample(output.logits, [LogitsRow(state, num_guesses) for state in drafting])
        for state, token in zip(drafting, drawn.tokens.tolist(), strict=True):
            state.tokens[state.num_tokens + num_guesses] = token
            if token in state.request.stop_ids:
                state.num_draft_tokens = num_guesses + 1


def _length_to_stop(draft: Sequence[int], state: RequestState) -> int:
    """The length up to and including the first stop id: nothing is drawn after it."""
    return next((i + 1 for i, token in enumerate(draft) if token in state.request.stop_ids), len(draft))

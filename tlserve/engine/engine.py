"""Continuous batching without I/O: requests in, one step at a time, tokens out.

Everything here is exact: what a request draws depends on its own tokens, parameters and seed, never on who
else runs or on how its tokens were cut into steps (docs/engine.md has the argument).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tlserve.config import EngineConfig
from tlserve.engine.drafters import Drafter, DraftModel, NoDrafter, PromptLookup
from tlserve.engine.kv_cache import KvCache
from tlserve.engine.pooling import add_hidden, finish_pooling
from tlserve.engine.request import EngineStats, FinishReason, GenRequest, PooledOut, RequestId, TokenOut
from tlserve.engine.sampler import LogitsRow, SampleFunction, Sampler
from tlserve.engine.scheduler import Scheduler
from tlserve.engine.speculative import num_accepted
from tlserve.engine.state import RequestState
from tlserve.engine.step_batch import BatchBuilder, Model, Piece
from tlserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from tlserve.kernels.sampling import SampledTokens
from tlserve.kernels.sampling import sample as sample_kernel
from tlserve.model.batch import Batch, ForwardOutput

Output = TokenOut | PooledOut


class Engine:
    """Runs requests to their end over one model.

    Not thread-safe: one task owns it and calls one method at a time. ``check`` and ``max_model_len`` read only
    what never changes and may be used by anyone at any time.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        max_waiting: int,
        draft_model: Model | None = None,
        sample: SampleFunction = sample_kernel,
    ) -> None:
        """``max_waiting`` requests may wait beside those that run; ``draft_model`` goes with its method.

        Raises ConfigError when the draft model does not fit the model.
        """
        self.max_model_len = min(model.max_model_len, model.num_blocks * model.block_size)
        self.max_waiting = max_waiting
        self._model = model
        self._kv_cache = KvCache(
            model.num_blocks,
            model.block_size,
            prefix_cache=config.prefix_cache,
            num_slots=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self._drafter = _new_drafter(config, model, draft_model, sample, self._kv_cache)
        self._scheduler = Scheduler(
            self._kv_cache,
            self._drafter,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
            prefill_chunk=config.prefill_chunk,
        )
        self._batches = BatchBuilder(
            self._kv_cache.block_tables, max_batch_tokens=config.max_batch_tokens, max_model_len=self.max_model_len
        )
        self._sampler = Sampler(config.max_num_seqs, sample)
        self._states: dict[RequestId, RequestState] = {}
        self._next_id = 0
        self._num_batch_tokens = 0
        self._num_generated = 0
        self._num_drafted = 0
        self._num_accepted = 0

    def warm_up(self) -> None:
        """Compute and draw one token of no request, so that the first request finds everything compiled.

        To be called before any request is added.
        """
        state = RequestState.new(RequestId(-1), GenRequest(prompt=(0,), max_tokens=1))
        state.slot = 0
        batch = self._batches.build([Piece(state, 0, 1, 1)])
        self._sampler.sample(self._model.forward(batch).logits, [LogitsRow(state, 0)])

    @property
    def num_free_places(self) -> int:
        """Requests that may be added now and will run or wait within ``max_waiting``; may be negative."""
        scheduler = self._scheduler
        is_stuck = scheduler.is_short_of_blocks and scheduler.waiting
        will_run = 0 if is_stuck else scheduler.max_running - len(scheduler.running)
        return self.max_waiting - len(scheduler.waiting) + will_run

    @property
    def max_requests(self) -> int:
        """Requests that can be in the engine at once, waiting or running."""
        return self.max_waiting + self._scheduler.max_running

    def check(self, request: GenRequest) -> None:
        """Raise InvalidRequest or ContextLengthExceeded for a request that can never be served."""
        if not request.prompt:
            raise InvalidRequest("the prompt must have at least one token", param="prompt")
        if min(request.prompt) < 0 or max(request.prompt) >= self._model.vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self._model.vocab_size - 1}", param="prompt")
        if any(not 0 <= token < self._model.vocab_size for token, _ in request.params.logit_bias):
            raise InvalidRequest(f"token ids must be from 0 to {self._model.vocab_size - 1}", param="logit_bias")
        if request.is_pooling != (request.max_tokens == 0) or request.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
        if len(request.prompt) + request.max_tokens > self.max_model_len:
            asked = f"{len(request.prompt)} tokens of prompt"
            if request.max_tokens:
                asked += f" and {request.max_tokens} to generate"
            raise ContextLengthExceeded(f"the context holds {self.max_model_len} tokens; this request asks for {asked}")

    def add_request(self, request: GenRequest) -> RequestId:
        """Queue a request; it runs in the next step that has room.

        Raises Overloaded when ``max_requests`` are there already, and what ``check`` raises.
        """
        if len(self._states) >= self.max_requests:
            raise Overloaded(f"{len(self._states)} requests are running or waiting, the most that are taken at once")
        self.check(request)
        state = RequestState.new(RequestId(self._next_id), request)
        if request.is_pooling:
            state.hidden_sum = np.zeros(self._model.hidden_size)
        self._next_id += 1
        self._states[state.id] = state
        self._scheduler.add(state)
        return state.id

    def abort(self, request_id: RequestId) -> None:
        """End a request; its blocks are free when this returns. Does nothing for one that has ended."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._scheduler.finish(state)

    def abort_all(self) -> None:
        for request_id in list(self._states):
            self.abort(request_id)

    def has_work(self) -> bool:
        return bool(self._states)

    def has_started(self, request_id: RequestId) -> bool:
        """Whether a request has ever been given blocks; True for one that has ended."""
        state = self._states.get(request_id)
        return state is None or state.num_cached_tokens is not None

    def step(self) -> list[Output]:
        """Compute one batch and return what it brought, the tokens of a request in their order.

        An exception leaves the engine in an unknown state: it must not be used again.
        """
        requests = self._scheduler.schedule().requests
        if not requests:
            self._num_batch_tokens = 0
            return []
        self._drafter.fill(requests)
        batch, rows = self._build(requests)
        computed = self._model.forward(batch)
        sampled = self._sampler.sample(computed.logits, rows)
        return self._update(requests, computed, sampled)

    def stats(self) -> EngineStats:
        blocks = self._kv_cache.blocks
        return EngineStats(
            num_blocks_free=blocks.num_free,
            num_blocks_used=blocks.num_used,
            num_blocks_cached=blocks.num_cached,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_batch_tokens=self._num_batch_tokens if self._states else 0,
            prefix_tokens_asked=self._kv_cache.num_tokens_asked,
            prefix_tokens_hit=self._kv_cache.num_tokens_hit,
            num_preemptions=self._scheduler.num_preemptions,
            num_kv_evictions=blocks.num_evictions,
            num_prompt_tokens=self._kv_cache.num_tokens_admitted,
            num_generated_tokens=self._num_generated,
            spec_tokens_drafted=self._num_drafted,
            spec_tokens_accepted=self._num_accepted,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the books disagree; for tests, between two steps."""
        self._scheduler.check_invariants()
        queued = [*self._scheduler.waiting, *self._scheduler.running]
        assert {state.id: state for state in queued} == self._states

    def _build(self, requests: Sequence[RequestState]) -> tuple[Batch, list[LogitsRow]]:
        pieces: list[Piece] = []
        rows: list[LogitsRow] = []
        for state in requests:
            start = state.num_computed_tokens
            stop = start + state.num_scheduled_tokens + state.num_draft_tokens
            num_logits = state.num_draft_tokens + 1 if state.wants_logits else 0
            pieces.append(Piece(state, start, stop, num_logits))
            rows += [LogitsRow(state, num_guesses) for num_guesses in range(num_logits)]
        batch = self._batches.build(pieces)
        self._num_batch_tokens = len(batch.token_ids)
        return batch, rows

    def _update(
        self, requests: Sequence[RequestState], computed: ForwardOutput, sampled: SampledTokens
    ) -> list[Output]:
        outputs: list[Output] = []
        drawn = sampled.tokens.tolist()
        logits_row = hidden_row = 0
        for state in requests:
            if state.is_pooling:
                end = hidden_row + state.num_scheduled_tokens
                outputs += self._take_hidden(state, computed, hidden_row, end)
                hidden_row = end
            elif state.wants_logits:
                end = logits_row + state.num_draft_tokens + 1
                outputs += self._take_tokens(state, drawn[logits_row:end], sampled, logits_row)
                logits_row = end
            else:
                state.num_computed_tokens += state.num_scheduled_tokens
                self._kv_cache.publish(state)
        return outputs

    def _take_tokens(self, state: RequestState, drawn: list[int], sampled: SampledTokens, row: int) -> list[TokenOut]:
        """Add what was drawn after the guesses that were right, and the draw that follows them."""
        num_known = state.num_tokens
        num_right = num_accepted(state.draft.tolist(), drawn) if state.num_draft_tokens else 0
        outputs: list[TokenOut] = []
        for place, token in enumerate(drawn[: num_right + 1]):
            finish = state.append(token)
            outputs.append(_token_out(state, token, finish, sampled, row + place))
            if finish is not None:
                break
        self._num_generated += len(outputs)
        # No more than has been taken: a draft ends before max_tokens and at a stop id.
        state.num_computed_tokens = num_known + num_right
        if state.num_draft_tokens:
            self._num_drafted += state.num_draft_tokens
            self._num_accepted += num_right
            self._drafter.record(state, num_right)
            state.num_draft_tokens = 0
        self._kv_cache.publish(state)
        if outputs[-1].finish is not None:
            self.abort(state.id)
        return outputs

    def _take_hidden(self, state: RequestState, computed: ForwardOutput, start: int, end: int) -> list[PooledOut]:
        assert state.hidden_sum is not None
        if state.num_computed_tokens == 0:  # also after a preemption
            state.hidden_sum[:] = 0.0
        add_hidden(state.hidden_sum, computed.hidden[start:end])
        state.num_computed_tokens += state.num_scheduled_tokens
        if state.num_pending_tokens:
            return []
        self.abort(state.id)
        return [PooledOut(state.id, finish_pooling(state.hidden_sum, state.num_tokens))]


class _Shape(Protocol):
    """What a model and its draft model have alike."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


def check_draft_model(model: _Shape, draft_model: _Shape) -> None:
    """Raises ConfigError when the draft model, or the plan of one, does not fit the model."""
    for name in ("vocab_size", "block_size", "num_blocks"):
        ours, theirs = getattr(model, name), getattr(draft_model, name)
        if ours != theirs:
            raise ConfigError(f"speculative.draft_model_dir: its {name} must be the model's {ours}, got {theirs}")


def _new_drafter(
    config: EngineConfig, model: Model, draft_model: Model | None, sample: SampleFunction, kv_cache: KvCache
) -> Drafter:
    speculative = config.speculative
    if speculative is None:
        return NoDrafter()
    if speculative.method == "prompt_lookup":
        return PromptLookup(
            num_tokens=speculative.num_tokens, ngram_min=speculative.ngram_min, ngram_max=speculative.ngram_max
        )
    assert draft_model is not None, "method = 'draft_model' needs the model"
    check_draft_model(model, draft_model)
    return DraftModel(
        draft_model,
        sample,
        kv_cache.block_tables,
        num_tokens=speculative.num_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )


def _token_out(
    state: RequestState, token: int, finish: FinishReason | None, sampled: SampledTokens, row: int
) -> TokenOut:
    num_cached = state.num_cached_tokens or 0
    count = state.request.params.num_logprobs
    if count is None:
        return TokenOut(state.id, token, finish, num_cached)
    ids, logprobs = sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    top = tuple((i, logprob) for i, logprob in zip(ids, logprobs, strict=True) if i >= 0)
    return TokenOut(state.id, token, finish, num_cached, float(sampled.logprobs[row]), top)

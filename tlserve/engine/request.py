"""What goes into the engine and what comes out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
from numpy.typing import NDArray

RequestId = NewType("RequestId", int)


class FinishReason(enum.Enum):
    """Why a request ended; the first two are the API's own words."""

    STOP = "stop"  # EOS or a stop id
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client left; nothing is sent


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is drawn from a row of logits. The order of application is docs/engine.md's."""

    temperature: float = 1.0  # 0 = greedy: the lowest id among the largest logits
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and generated tokens
    presence_penalty: float = 0.0  # counts generated tokens
    frequency_penalty: float = 0.0  # counts generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None  # None = none, 0 = the drawn token's own, k = and the k most likely


@dataclass(frozen=True, slots=True)
class GenRequest:
    """A prompt to continue, or, with ``is_pooling``, to read for the mean of its hidden states.

    A pooling request generates nothing: ``max_tokens`` is 0 and its only output is a PooledOut.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # int64; draws are stream(seed, index of the token)
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # stop ids cannot be drawn before that many tokens
    priority: int = 0  # -100..100, higher sooner
    is_pooling: bool = False


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One generated token of one request. ``finish`` is set on the last one.

    A stop id that ended the request is reported as its last token; its text is not part of the answer.
    """

    id: RequestId
    token: int
    finish: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    logprob: float | None = None  # of the model's own distribution; None where none was asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first, ties by lowest id


@dataclass(frozen=True, slots=True)
class PooledOut:
    """The only output of a pooling request."""

    id: RequestId
    embedding: NDArray[np.float32]  # [hidden_size], unit length
    num_cached_tokens: int = 0
    finish: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A frozen record of the engine between two steps; counters never fall."""

    num_blocks_free: int
    num_blocks_used: int  # held by a live request
    num_blocks_cached: int  # held by the prefix cache alone; taken when needed
    num_waiting: int
    num_running: int
    num_batch_tokens: int  # of the last step
    prefix_tokens_asked: int
    prefix_tokens_hit: int
    num_preemptions: int
    num_kv_evictions: int
    num_prompt_tokens: int = 0  # of all requests that have begun to run, embeddings as well
    num_generated_tokens: int = 0
    spec_tokens_drafted: int = 0
    spec_tokens_accepted: int = 0

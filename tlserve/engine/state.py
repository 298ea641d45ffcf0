"""What the engine knows of one request between steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlserve.engine.prefix_cache import CacheEntry
from tlserve.engine.request import FinishReason, GenRequest, RequestId
from tlserve.engine.speculative import DraftLength, NgramIndex

# A request's tokens, from the first of the prompt:
#
# [0, num_computed_tokens)            their keys and values are in the blocks
# [num_computed_tokens, num_tokens)   known, still to be computed
# [num_tokens, + num_draft_tokens)    guesses, computed in this step and then accepted or forgotten
#
# and its blocks:
#
# [0, num_published_blocks)           full and computed: the prefix cache can give them to others, none is written
# [num_published_blocks, ...)         this request's alone; the part past the tokens is reserved


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class RequestState:
    id: RequestId
    request: GenRequest
    tokens: NDArray[np.int32]  # [prompt + max_tokens]
    num_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # known tokens that this step computes
    num_draft_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found when first admitted; None before
    slot: int = -1  # row of the block tables while running
    block_ids: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    cache_entry: CacheEntry | None = None  # of the last published block, or the root, while running with a cache
    hidden_sum: NDArray[np.float64] | None = None  # [hidden_size] of a pooling request
    draft_length: DraftLength | None = None
    ngrams: NgramIndex | None = None  # of prompt_lookup
    num_draft_computed: int = 0  # tokens whose keys and values the draft model has

    @classmethod
    def new(cls, request_id: RequestId, request: GenRequest) -> RequestState:
        tokens = np.zeros(len(request.prompt) + request.max_tokens, np.int32)
        tokens[: len(request.prompt)] = request.prompt
        return cls(request_id, request, tokens, len(request.prompt))

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts the most urgent first: by priority, then by arrival."""
        return (-self.request.priority, self.id)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.request.prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed yet; 1 while the request generates."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_pooling(self) -> bool:
        return self.request.is_pooling

    @property
    def wants_logits(self) -> bool:
        """Whether this step computes the last known token, so that the next one can be drawn."""
        return self.num_pending_tokens == self.num_scheduled_tokens and not self.request.is_pooling

    @property
    def draft(self) -> NDArray[np.int32]:
        """[num_draft_tokens] the guesses of this step."""
        return self.tokens[self.num_tokens : self.num_tokens + self.num_draft_tokens]

    def append(self, token: int) -> FinishReason | None:
        """Add a drawn token; says whether it is the last."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.request.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens == len(self.tokens) else None

    def __repr__(self) -> str:
        return (
            f"<RequestState {self.id} {self.status.value} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} blocks={len(self.block_ids)}>"
        )

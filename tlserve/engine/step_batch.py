"""From what the scheduler decided to the arrays that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tlserve.engine.state import RequestState
from tlserve.model.batch import Batch, ForwardOutput


class Model(Protocol):
    """What computes a step. It owns the keys and values of ``num_blocks`` blocks and nothing else of a request."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...

    def forward(self, batch: Batch) -> ForwardOutput: ...


class Piece(NamedTuple):
    """Tokens [start, stop) of one request; logits are wanted after the last ``num_logits`` of them."""

    state: RequestState
    start: int
    stop: int
    num_logits: int = 0


class BatchBuilder:
    """Fills the same arrays anew for each step: a batch stays valid until the next one is built."""

    def __init__(self, block_tables: NDArray[np.int32], *, max_batch_tokens: int, max_model_len: int) -> None:
        self._block_tables = block_tables
        self._token_ids = np.zeros(max_batch_tokens, np.int32)
        self._positions = np.zeros(max_batch_tokens, np.int32)
        self._request_rows = np.zeros(max_batch_tokens, np.int32)
        self._count = np.arange(max_model_len, dtype=np.int32)

    def build(self, pieces: Sequence[Piece]) -> Batch:
        row = 0
        logits_rows: list[int] = []
        hidden_rows: list[int] = []
        for state, start, stop, num_logits in pieces:
            end = row + stop - start
            self._token_ids[row:end] = state.tokens[start:stop]
            self._positions[row:end] = self._count[start:stop]
            self._request_rows[row:end] = state.slot
            if num_logits:
                logits_rows += range(end - num_logits, end)
            if state.is_pooling:
                hidden_rows += range(row, end)
            row = end
        return Batch(
            token_ids=self._token_ids[:row],
            positions=self._positions[:row],
            request_rows=self._request_rows[:row],
            block_tables=self._block_tables,
            logits_rows=np.array(logits_rows, np.int32),
            hidden_rows=np.array(hidden_rows, np.int32),
        )

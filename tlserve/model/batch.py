"""The arrays of one step: what the scheduler decided, in the shape the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """One row for each token that this step computes; the tokens of a request are adjacent and in order.

    A token at position p of request row r has its key and value written to block
    ``block_tables[r, p // block_size]`` at offset ``p % block_size`` and attends to positions 0..p of
    that table. Table entries past a request's last position are never read.
    """

    token_ids: NDArray[np.int32]  # [num_tokens]
    positions: NDArray[np.int32]  # [num_tokens] absolute, 0 = first token of the prompt
    request_rows: NDArray[np.int32]  # [num_tokens] row of block_tables
    block_tables: NDArray[np.int32]  # [num_requests, max_blocks_per_request]
    logits_rows: NDArray[np.int32]  # [num_logits] token rows whose logits are wanted, ascending
    hidden_rows: NDArray[np.int32]  # [num_hidden] token rows whose final-normed hidden state is wanted, ascending


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass gives back; the arrays are views that stay valid until the next forward pass."""

    logits: NDArray[np.float32]  # [num_logits, vocab_size]
    hidden: NDArray[np.float32]  # [num_hidden, hidden_size]

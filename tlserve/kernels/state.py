"""What a forward pass reads and writes, as tuples of numbers and arrays that Python and kernels share.

All of it is allocated once; a step only fills the batch part of Work. Python makes the tuples, kernels take them whole.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray


class Matrix(IntEnum):
    """The matrices of a layer, as places in ``Weights.matrices``."""

    Q = 0
    K = 1
    V = 2
    OUTPUT = 3
    GATE = 4
    UP = 5
    DOWN = 6


class Field(IntEnum):
    """What is known of a matrix; offsets are bytes in the arena."""

    FORMAT = 0  # layout code
    AT = 1
    ROWS = 2
    COLUMNS = 3
    BIAS = 4  # offset of f32 [rows], or ABSENT


class Norm(IntEnum):
    """The norm weights of a layer, f32, as places in ``Weights.norms``."""

    INPUT = 0
    POST_ATTENTION = 1
    Q = 2
    K = 3


ABSENT = -1

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Dims(NamedTuple):
    """The model's shape and the cache's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_number_bytes: int  # 2 = f16, 4 = f32


class Weights(NamedTuple):
    """The packed model; nothing here changes after loading."""

    kernels: NDArray[np.int64]  # leaves.addresses', for the formats of this model
    arena: NDArray[np.uint8]
    matrices: NDArray[np.int64]  # [num_layers, len(Matrix), len(Field)]
    norms: NDArray[np.int64]  # [num_layers, len(Norm)] offsets, or ABSENT
    embedding: NDArray[np.int64]  # [len(Field)]
    head: NDArray[np.int64]  # [len(Field)]
    final_norm: NDArray[np.int64]  # [1] offset
    constants: NDArray[np.float32]  # [1] rms_norm_eps
    attention: NDArray[np.int64]  # attention_addresses'
    cosines: NDArray[np.float32]  # [max_model_len * head_dim / 2]
    sines: NDArray[np.float32]  # the same


class Work(NamedTuple):
    """The batch of a step, the cache, and room for everything in between."""

    sizes: NDArray[np.int64]  # [4] tokens, logits rows, hidden rows, runs of this step
    token_ids: NDArray[np.int32]  # [max_tokens]
    positions: NDArray[np.int32]  # [max_tokens]
    request_rows: NDArray[np.int32]  # [max_tokens]
    block_tables: NDArray[np.int32]  # [max_requests, max_blocks_per_request]
    logits_rows: NDArray[np.int32]  # [max_logits]
    hidden_rows: NDArray[np.int32]  # [max_hidden]
    kv: NDArray[np.uint8]  # [num_blocks, num_layers, num_kv_heads, block_size / 16] sub-blocks
    runs: NDArray[np.int64]  # [max_tokens + 1] first token of each run that attention takes at once, then the end
    x: NDArray[np.float32]  # [max_tokens, hidden_size] the residual stream
    normed: NDArray[np.float32]  # [max_tokens, hidden_size or heads]
    quantised: NDArray[np.uint8]  # activations for quantised matrices but DOWN, as product.py lays them out
    spread: NDArray[np.uint8]  # the same for float matrices
    qkv: NDArray[np.float32]  # [max_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    gate_up: NDArray[np.float32]  # [max_tokens, 2 * intermediate_size]; then silu(gate) * up in place of gate
    acted: NDArray[np.uint8]  # activations for DOWN, written while others are still read
    logits: NDArray[np.float32]  # [max_logits, vocab_size]
    hidden: NDArray[np.float32]  # [max_hidden, hidden_size]
    attention: NDArray[np.float32]  # [threads, attention.scratch_floats]


_F32, _I32, _I64, _U8 = types.float32[::1], types.int32[::1], types.int64[::1], types.uint8[::1]

# numba has no types of its own
_named: Any = types.NamedTuple
_uniform: Any = types.NamedUniTuple

DIMS = _uniform(types.int64, len(Dims._fields), Dims)
_TABLE = types.int64[:, ::1]
WEIGHTS = _named([_TABLE, _U8, types.int64[:, :, ::1], _TABLE, _I64, _I64, _I64, _F32, _TABLE, _F32, _F32], Weights)

WORK = _named(
    [
        *[_I64, _I32, _I32, _I32, types.int32[:, ::1], _I32, _I32],
        *[_U8, _I64, _F32, _F32, _U8, _U8, _F32, _F32, _U8, _F32, _F32],
        types.float32[:, ::1],
    ],
    Work,
)

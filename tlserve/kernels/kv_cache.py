"""The cache of keys and values: where a number lies, and how it gets there.

A KV block holds ``block_size`` tokens of every layer and head, as sub-blocks of 16 tokens. A sub-block is
``keys [width][16]`` then ``values [16][width]``, where width is head_dim rounded up to 16: scores of 16 tokens need no
sum over lanes, and neither does the weighted sum of values. Its numbers are f16 or f32; ``kv`` is an array of bytes,
and so are all places in it.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from tlserve.kernels.emit import LANES, POINTER, STATIC, Static, f32x16, instruction
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.simd import (
    emit_f32_to_f16,
    emit_scatter,
    load_f16,
    load_f32,
    load_f32_first,
    maximum,
    minimum,
    splat,
    store_f16,
    store_f32,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SUB_BLOCK = 16  # tokens whose scores are one register
MAX_F16 = np.float32(65504.0)


@dataclass(frozen=True)
class Number:
    """How the cache's numbers are stored."""

    number_bytes: int  # 2 = f16, 4 = f32


@register_jitable
def padded_head(head_dim: int) -> int:
    return (head_dim + 15) // 16 * 16


@register_jitable
def sub_block_bytes(head_dim: int, number_bytes: int) -> int:
    """Bytes of the keys and values of 16 tokens of one head."""
    return 2 * SUB_BLOCK * padded_head(head_dim) * number_bytes


@instruction(types.void, STATIC, POINTER, f32x16)
def _scatter(b: Any, number: Number, pointer: Any, vector: Any) -> None:
    """Lane i to the number that is 16 * i numbers after the pointer."""
    numbers = emit_f32_to_f16(b, vector) if number.number_bytes == 2 else vector
    emit_scatter(b, pointer, numbers, LANES)


@inline
def load_numbers(number: Any, kv: int, at: int) -> Any:
    return load_f16(kv, at) if number.number_bytes == 2 else load_f32(kv, at)


@jit
def _write_kv(
    number: Any, is_key: bool, kv: Bytes, sub_block: int, offset: int, head_dim: int, x: Floats, x_at: int
) -> None:
    size = number.number_bytes
    limit = splat(MAX_F16)
    for d in range(0, head_dim, LANES):
        vector = load_f32_first(x, x_at + d, np.int32(min(LANES, head_dim - d)))
        vector = maximum(minimum(vector, limit), splat(-MAX_F16))
        at = sub_block + ((LANES + offset) * padded_head(head_dim) + d) * size
        if is_key:
            _scatter(number, kv, sub_block + (d * LANES + offset) * size, vector)
        elif size == 2:
            store_f16(kv, at, vector)
        else:
            store_f32(kv, at, vector)


_HALF, _SINGLE = Static(Number(2)), Static(Number(4))


@jit
def write_kv(
    number_bytes: int, is_key: bool, kv: Bytes, sub_block: int, offset: int, head_dim: int, x: Floats, x_at: int
) -> None:
    """Keeps one head's key or value x[x_at:] of a token at ``offset`` 0..15 of a sub-block.

    What an f16 cannot hold becomes its largest (in f32 too): an infinity would spoil sums it has no weight in.
    """
    if number_bytes == 2:
        _write_kv(_HALF, is_key, kv, sub_block, offset, head_dim, x, x_at)
    else:
        _write_kv(_SINGLE, is_key, kv, sub_block, offset, head_dim, x, x_at)


@inline
def sub_block_at(block: int, position: int, block_size: int, block_stride: int, sub_bytes: int) -> int:
    """Where, within one layer and head, the sub-block of ``position`` is, which lies in ``block``."""
    return np.int64(block) * block_stride + position % block_size // SUB_BLOCK * sub_bytes

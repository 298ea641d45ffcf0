"""What a matrix product works on: the activations, in the form its weights need, and where everything lies.

Columns (tokens) lie in memory in runs of ``lanes``, so that those of a register tile are neighbours. For quantised
weights the activations are records of 64 bytes, one for each group of 32 k (tile.py says what is in them); for float
weights they are float32. With K groups or floats to a column, that of column c at index i is number
((c // lanes) * K + i) * lanes + c % lanes.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import F32, I32, POINTER, instruction, pointer_to
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.layout import FIRST_QUANTISED, GROUP
from tlserve.kernels.leaves import MAX_LANES
from tlserve.kernels.simd import (
    ROUND_BITS,
    absolute,
    load_f32,
    max_lanes,
    maximum,
    round_i32,
    splat,
    store_i8,
    sum_lanes_i32,
)
from tlserve.kernels.tile import HALF_STARTS_AT, RECORD, SCALE_AT, START_AT, SUM_AT

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

START_8, START_16, START_128 = (START_AT[offset] for offset in (8, 16, 128))
START_LOW, START_HIGH = HALF_STARTS_AT


@instruction(types.void, POINTER, types.float32)
def set_f32(b: Any, pointer: Any, value: Any) -> None:
    b.store(value, pointer_to(b, pointer, F32), align=4)


@instruction(types.void, POINTER, types.int32)
def set_i32(b: Any, pointer: Any, value: Any) -> None:
    b.store(value, pointer_to(b, pointer, I32), align=4)


@jit
def lanes_for(columns: int) -> int:
    """Columns that lie side by side in memory when there are so many in all."""
    return min(columns, MAX_LANES)


def activation_bytes(columns: int, k: int) -> int:
    """What a buffer for that many columns must hold, whatever the format of the weights."""
    return 4 * k * (columns + MAX_LANES)


@jit
def quantise(
    x: Floats, x_at: int, first: int, last: int, k: int, act: Bytes, act_at: int, column: int, lanes: int
) -> None:
    """``put_column`` for quantised weights.

    Each group is scaled by its largest magnitude / 127 and rounded to nearest, ties to even.
    """
    record = act_at + ((column // lanes * (k // GROUP) + first // GROUP) * lanes + column % lanes) * RECORD
    for i in range(x_at + first, x_at + last, GROUP):
        quantise_group(load_f32(x, i), load_f32(x, i + 16), act, record)
        record += lanes * RECORD


@inline
def quantise_group(low: Any, high: Any, act: Bytes, record: int) -> None:
    """Writes one record from 32 floats in two f32x16."""
    largest = max_lanes(maximum(absolute(low), absolute(high)))
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    low, high = round_i32(low * splat(inverse)), round_i32(high * splat(inverse))
    store_i8(act, record, low)
    store_i8(act, record + 16, high)
    first, last = sum_lanes_i32(low), sum_lanes_i32(high)
    total = first + last
    scale = largest * np.float32(1 / 127)
    set_f32(act, record + SCALE_AT, scale)
    set_f32(act, record + SUM_AT, scale * np.float32(total))
    set_i32(act, record + START_8, ROUND_BITS - 8 * total)
    set_i32(act, record + START_16, ROUND_BITS - 16 * total)
    set_i32(act, record + START_128, ROUND_BITS - 128 * total)
    set_i32(act, record + START_LOW, ROUND_BITS - 32 * first)
    set_i32(act, record + START_HIGH, ROUND_BITS - 32 * last)


@jit
def spread(
    x: Floats, x_at: int, first: int, last: int, k: int, act: Bytes, act_at: int, column: int, lanes: int
) -> None:
    """``put_column`` for float weights."""
    at = act_at + 4 * (column // lanes * k * lanes + column % lanes)
    for i in range(first, last):
        set_f32(act, at + 4 * lanes * i, x[x_at + i])


@jit
def put_column(
    quantised: bool, x: Floats, x_at: int, first: int, last: int, k: int,
    act: Bytes, act_at: int, column: int, lanes: int,
) -> None:  # fmt: skip
    """Writes the part [first, last) of one column x[x_at : x_at + k] of the activations at byte ``act_at``.

    It has the form that weights need which are ``quantised`` or not; if they are, the part is whole groups of 32.
    """
    if quantised:
        quantise(x, x_at, first, last, k, act, act_at, column, lanes)
    else:
        spread(x, x_at, first, last, k, act, act_at, column, lanes)


@inline
def is_quantised(code: int) -> bool:
    """Whether weights of this format are multiplied as integers."""
    return code >= FIRST_QUANTISED


class Product(NamedTuple):
    """One matrix product; kernels build it and pass it on whole. Offsets are in bytes, y_at and y_stride in floats."""

    kernels: NDArray[np.int64]  # leaves.addresses of the layouts of the model
    arena: Bytes
    code: int  # of the weights' layout
    offset: int  # of the packed weights in the arena
    rows: int
    k: int
    bias: int  # of f32 [rows] in the arena, or -1
    act: Bytes  # activations, as ``put_column`` writes them
    act_at: int
    columns: int
    lanes: int  # what the activations were written with: lanes_for(columns), or up to MAX_LANES
    y: Floats
    y_at: int  # y[y_at + c * y_stride + r] is row r of column c
    y_stride: int
    accumulate: bool  # add to y instead of replacing it

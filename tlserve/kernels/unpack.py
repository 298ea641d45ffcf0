"""Weights from the arena back to floats: rows of the token embedding, and the proof that packing loses nothing.

Each format is evaluated as its reference does, in the same order of float operations.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import I16, I32, POINTER, instruction, pointer_to
from tlserve.kernels.jit import entry, jit
from tlserve.kernels.layout import (
    BITS,
    BLOCK_BYTES,
    BLOCK_GROUPS,
    F16,
    F32,
    FIRST_QUANTISED,
    GROUP,
    GROUP_BYTES,
    HALVES,
    HEADER,
    IS_K,
    K_BYTES,
    OFFSET,
    ROWS,
    TABLE,
    VALUES,
    Layout,
)
from tlserve.kernels.simd import scalar_f16

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_F32, _F16 = F32.code, F16.code


def unpack(layout: Layout, arena: Bytes, offset: int, rows: int, k: int) -> Floats:
    """The float32 [rows, k] that the format defines for what was packed at ``offset``."""
    values = np.empty((rows, k), np.float32)
    _unpack(layout.code, arena, offset, values)
    return values


@instruction(types.uint32, POINTER)
def load_u32(b: Any, pointer: Any) -> Any:
    return b.load(pointer_to(b, pointer, I32), align=1)


@instruction(types.uint32, POINTER)
def load_u16(b: Any, pointer: Any) -> Any:
    return b.zext(b.load(pointer_to(b, pointer, I16), align=1), I32)


@instruction(types.float32, types.uint32)
def float_of(b: Any, bits: Any) -> Any:
    return b.bitcast(bits, ir.FloatType())


@jit
def tile_size(code: int, k: int) -> int:
    """Bytes of a tile of 16 rows and k columns."""
    layout = TABLE[code]
    if code < FIRST_QUANTISED:
        return k * layout[K_BYTES]
    return k // (GROUP * layout[BLOCK_GROUPS]) * layout[BLOCK_BYTES]


@jit
def _q_at(bits: int, arena: Bytes, at: int, row: int, i: int) -> int:
    """The q of a row at k = i of the group that begins at byte ``at``."""
    v, byte = i // 4, at + 4 * row + i % 4
    if bits == 8:
        return np.int64(arena[byte + 64 * v])
    q = np.int64(arena[byte + 64 * (v // 2)]) >> (4 * (v % 2)) & 15
    if bits == 5:
        q |= (np.int64(arena[byte + 256]) >> v & 1) << 4
    elif bits == 6:
        q |= (np.int64(arena[byte + 256 + 64 * (v // 4)]) >> (2 * (v % 4)) & 3) << 4
    return q


@jit
def _unpack_group(code: int, arena: Bytes, header: int, at: int, row: int, out: Floats, out_at: int) -> None:
    layout = TABLE[code]
    scales = at + layout[VALUES]
    minimum = np.float32(0)
    if layout[IS_K] == 0:
        scale = scalar_f16(arena, scales + 2 * row)
        if layout[OFFSET] == 0:
            minimum = scalar_f16(arena, scales + 32 + 2 * row)
    elif layout[HALVES] == 0:
        scale = scalar_f16(arena, header + 2 * row) * np.float32(arena[scales + row])
        minimum = -(scalar_f16(arena, header + 32 + 2 * row) * np.float32(arena[scales + 16 + row]))
    for i in range(GROUP):
        q = _q_at(layout[BITS], arena, at, row, i)
        if layout[HALVES]:
            factor = np.int8(arena[scales + 16 * (i // 16) + row])
            scale = scalar_f16(arena, header + 2 * row) * np.float32(factor)
        value = scale * np.float32(q - layout[OFFSET])
        out[out_at + i] = value + minimum if layout[OFFSET] == 0 else value


@jit
def _float_at(code: int, arena: Bytes, at: int) -> np.float32:
    if code == _F32:
        return float_of(load_u32(arena, at))
    if code == _F16:
        return scalar_f16(arena, at)
    return float_of(load_u16(arena, at) << 16)


@jit
def unpack_row(code: int, arena: Bytes, offset: int, row: int, k: int, out: Floats, out_at: int) -> None:
    """out[out_at : out_at + k] = row of the matrix packed at ``offset``, as the format defines it, bit for bit."""
    layout = TABLE[code]
    tile = offset + row // ROWS * tile_size(code, k)
    row %= ROWS
    if code < FIRST_QUANTISED:
        size = layout[BITS] // 8
        for i in range(k):
            out[out_at + i] = _float_at(code, arena, tile + size * (ROWS * i + row))
        return
    for group in range(k // GROUP):
        header = tile + group // layout[BLOCK_GROUPS] * layout[BLOCK_BYTES]
        at = header + layout[HEADER] + group % layout[BLOCK_GROUPS] * layout[GROUP_BYTES]
        _unpack_group(code, arena, header, at, row, out, out_at + GROUP * group)


@entry("void(i8, u1[::1], i8, f4[:, ::1])")
def _unpack(code: int, arena: Bytes, offset: int, out: Floats) -> None:
    """out [rows, k]"""
    rows, k = out.shape
    flat = out.reshape(rows * k)
    for row in range(rows):
        unpack_row(code, arena, offset, row, k, flat, row * k)

"""Weights from a file's rows to the arena's tiles. Packing moves bits and loses none."""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import I16, I32, POINTER, address, broadcast, instruction, pointer_to
from tlserve.kernels.jit import entry, jit
from tlserve.kernels.layout import FILE_BYTES, GROUP, Q8_0, ROWS, TABLE, Layout
from tlserve.kernels.pack_leaves import call_pack, pack_leaf
from tlserve.kernels.simd import emit_f32_to_f16

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Order = NDArray[np.int64]

HUGE_PAGE = 1 << 21
_Q8_0 = Q8_0.code


def allocate(size: int) -> Bytes:
    """Zeroed bytes for an arena, on huge pages where the system has them: reading weights is bound by memory."""
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    arena = np.frombuffer(pages, np.uint8)
    start = -arena.ctypes.data % HUGE_PAGE
    return arena[start : start + size]


def packed_bytes(layout: Layout, rows: int, k: int) -> int:
    """Bytes that ``pack`` fills, a multiple of 64."""
    return layout.packed_bytes(rows, k)


def pack(layout: Layout, stored: Bytes, k: int, arena: Bytes, offset: int, *, order: Order | None = None) -> None:
    """Writes a matrix into ``arena[offset : offset + packed_bytes(layout, rows, k)]``, which must be zeroed.

    ``stored`` [rows, row bytes] is as in the file, rows of k values; packed row r is ``stored[order[r]]``. Releases the
    GIL. k is a multiple of the format's block, and of 32 for quantised formats.
    """
    row_bytes = layout.file_row_bytes(k)
    if k % layout.file_block or stored.shape[1] != row_bytes:
        raise ValueError(f"a {layout.name} row of {k} values cannot have {stored.shape[1]} bytes")
    rows = np.arange(len(stored)) if order is None else order
    blocks = k // (GROUP * layout.block_groups) if layout.is_quantised else k
    no_row = np.zeros(row_bytes, np.uint8)
    tile_rows = np.empty(ROWS, np.int64)
    _pack(
        pack_leaf(layout).address, stored.reshape(-1), row_bytes, rows, no_row, tile_rows,
        blocks, arena, offset, layout.tile_bytes(k),
    )  # fmt: skip


@entry("void(i8, Array(u1, 1, 'C', readonly=True), i8, i8[::1], u1[::1], i8[::1], i8, u1[::1], i8, i8)")
def _pack(
    leaf: int, stored: Bytes, row_bytes: int, order: Order, no_row: Bytes, tile_rows: Order,
    blocks: int, arena: Bytes, offset: int, tile_bytes: int,
) -> None:  # fmt: skip
    """stored [rows * row_bytes] -> arena[offset:]; no_row [row_bytes] fills the last tile; tile_rows [16]: scratch."""
    for first in range(0, len(order), ROWS):
        for row in range(ROWS):
            if first + row < len(order):
                tile_rows[row] = address(stored, order[first + row] * row_bytes)
            else:
                tile_rows[row] = address(no_row, 0)
        call_pack(leaf, address(tile_rows, 0), blocks, address(arena, offset + first // ROWS * tile_bytes))


def quantise_rows(values: Floats, layout: Layout) -> Bytes:
    """Float rows [rows, k] as rows of a file in Q8_0 or Q4_1, k a multiple of 32; every value must be finite."""
    rows, k = values.shape
    stored = np.empty((rows, layout.file_row_bytes(k)), np.uint8)
    _quantise_rows(layout.code, np.ascontiguousarray(values).reshape(-1), stored.reshape(-1))
    return stored


@instruction(types.void, POINTER, types.float32)
def store_half(b: Any, pointer: Any, value: Any) -> None:
    """One float, rounded to f16."""
    half = b.extract_element(emit_f32_to_f16(b, broadcast(b, value)), ir.Constant(I32, 0))
    b.store(half, pointer_to(b, pointer, I16), align=1)


@jit
def _quantise_q8(values: Floats, at: int, out: Bytes, out_at: int) -> None:
    largest = np.float32(0)
    for i in range(GROUP):
        largest = max(largest, abs(values[at + i]))
    scale = largest / np.float32(127)
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    store_half(out, out_at, scale)
    for i in range(GROUP):
        # To nearest, ties away from zero: what every writer of the format does.
        value = values[at + i] * inverse
        out[out_at + 2 + i] = np.uint8(np.int64(np.floor(abs(value) + np.float32(0.5)) * np.sign(value)))


@jit
def _quantise_q4(values: Floats, at: int, out: Bytes, out_at: int) -> None:
    lowest = highest = values[at]
    for i in range(GROUP):
        lowest, highest = min(lowest, values[at + i]), max(highest, values[at + i])
    scale = (highest - lowest) / np.float32(15)
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    store_half(out, out_at, scale)
    store_half(out, out_at + 2, lowest)
    for i in range(GROUP // 2):
        low = min(15, np.int64((values[at + i] - lowest) * inverse + np.float32(0.5)))
        high = min(15, np.int64((values[at + 16 + i] - lowest) * inverse + np.float32(0.5)))
        out[out_at + 4 + i] = np.uint8(low | high << 4)


@entry("void(i8, f4[::1], u1[::1])")
def _quantise_rows(code: int, values: Floats, out: Bytes) -> None:
    """values [rows * k] -> blocks of the file format"""
    size = TABLE[code, FILE_BYTES]
    for group in range(len(values) // GROUP):
        if code == _Q8_0:
            _quantise_q8(values, group * GROUP, out, group * size)
        else:
            _quantise_q4(values, group * GROUP, out, group * size)

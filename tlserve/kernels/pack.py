"""Weights from a file's rows to the arena's tiles, and back to floats.

Packing moves bits and loses none: ``unpack_row`` evaluates each format as its reference does, in the same order of
float operations. Rows are handled four values at a time, as the bytes of a uint32.
"""

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

from tlserve.kernels.emit import I16, I32, POINTER, broadcast, instruction, pointer_to
from tlserve.kernels.jit import entry, inline, jit
from tlserve.kernels.layout import (
    BITS,
    BLOCK_BYTES,
    BLOCK_GROUPS,
    BY_CODE,
    FILE_BYTES,
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
from tlserve.kernels.simd import emit_f32_to_f16, scalar_f16

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
Order = NDArray[np.int64]

LOW = np.uint32(0x0F0F0F0F)
ONES = np.uint32(0x01010101)
TWOS = np.uint32(0x03030303)
SPREAD = np.uint32(0x00204081)  # times four bits: bit i becomes bit 0 of byte i, other bits come along
SIGNS = np.uint32(0x80808080)
HUGE_PAGE = 1 << 21

_F32, _F16, _BF16, _Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = (layout.code for layout in BY_CODE)


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
    if k % layout.file_block or stored.shape[1] != layout.file_row_bytes(k):
        raise ValueError(f"a {layout.name} row of {k} values cannot have {stored.shape[1]} bytes")
    rows = np.arange(len(stored)) if order is None else order
    _pack(layout.code, stored.reshape(-1), rows, k, arena, offset, np.empty(8, np.uint32))


def unpack(layout: Layout, arena: Bytes, offset: int, rows: int, k: int) -> Floats:
    """The float32 [rows, k] that the format defines for what was packed at ``offset``."""
    values = np.empty((rows, k), np.float32)
    _unpack(layout.code, arena, offset, values)
    return values


def quantise_rows(values: Floats, layout: Layout) -> Bytes:
    """Float rows [rows, k] as rows of a file in Q8_0 or Q4_1, k a multiple of 32; every value must be finite."""
    rows, k = values.shape
    stored = np.empty((rows, layout.file_row_bytes(k)), np.uint8)
    _quantise_rows(layout.code, np.ascontiguousarray(values).reshape(-1), stored.reshape(-1))
    return stored


# ---- unaligned words ----


@instruction(types.uint32, POINTER)
def load_u32(b: Any, pointer: Any) -> Any:
    return b.load(pointer_to(b, pointer, I32), align=1)


@instruction(types.uint32, POINTER)
def load_u16(b: Any, pointer: Any) -> Any:
    return b.zext(b.load(pointer_to(b, pointer, I16), align=1), I32)


@instruction(types.void, POINTER, types.uint32)
def store_u32(b: Any, pointer: Any, value: Any) -> None:
    b.store(value, pointer_to(b, pointer, I32), align=1)


@instruction(types.void, POINTER, types.uint32)
def store_u16(b: Any, pointer: Any, value: Any) -> None:
    b.store(b.trunc(value, I16), pointer_to(b, pointer, I16), align=1)


@instruction(types.void, POINTER, types.float32)
def store_half(b: Any, pointer: Any, value: Any) -> None:
    """One float, rounded to f16."""
    half = b.extract_element(emit_f32_to_f16(b, broadcast(b, value)), ir.Constant(I32, 0))
    b.store(half, pointer_to(b, pointer, I16), align=1)


@instruction(types.float32, types.uint32)
def float_of(b: Any, bits: Any) -> Any:
    return b.bitcast(bits, ir.FloatType())


# ---- file -> q ----


@inline
def _read_nibbles(file: Bytes, at: int, q: Words) -> None:
    """16 bytes: values 0..15 in the low halves, 16..31 in the high ones."""
    for v in range(4):
        word = load_u32(file, at + 4 * v)
        q[v] = word & LOW
        q[4 + v] = (word >> 4) & LOW


@inline
def _read_fifths(file: Bytes, at: int, q: Words) -> None:
    """Bit i of 32 belongs to value i."""
    bits = load_u32(file, at)
    for v in range(8):
        q[v] |= (((bits >> (4 * v)) & 15) * SPREAD & ONES) << 4


@inline
def _read_k_nibbles(file: Bytes, at: int, group: int, q: Words) -> None:
    """32 bytes for each two groups, the even one in the low halves."""
    for v in range(8):
        q[v] = (load_u32(file, at + 32 * (group // 2) + 4 * v) >> (4 * (group % 2))) & LOW


@inline
def _read_q6(file: Bytes, at: int, group: int, q: Words) -> None:
    """Four groups for each half of the block: 64 bytes of low halves, 32 of bit pairs from byte 128 on."""
    half, part = group // 4, group % 4
    for v in range(8):
        low = load_u32(file, at + 64 * half + 32 * (part % 2) + 4 * v) >> (4 * (part // 2))
        high = load_u32(file, at + 128 + 32 * half + 4 * v) >> (2 * part)
        q[v] = (low & LOW) | (high & TWOS) << 4


@jit
def _read_group(code: int, file: Bytes, at: int, group: int, q: Words) -> None:
    """The 32 values of a group of the block at byte ``at`` as unsigned q, four to a word of q [8] uint32."""
    if code == _Q4_0:
        _read_nibbles(file, at + 2, q)
    elif code == _Q4_1:
        _read_nibbles(file, at + 4, q)
    elif code == _Q5_0:
        _read_nibbles(file, at + 6, q)
        _read_fifths(file, at + 2, q)
    elif code == _Q5_1:
        _read_nibbles(file, at + 8, q)
        _read_fifths(file, at + 4, q)
    elif code == _Q8_0:
        for v in range(8):
            q[v] = load_u32(file, at + 2 + 4 * v) ^ SIGNS
    elif code == _Q4_K:
        _read_k_nibbles(file, at + 16, group, q)
    elif code == _Q5_K:
        _read_k_nibbles(file, at + 48, group, q)
        for v in range(8):
            q[v] |= ((load_u32(file, at + 16 + 4 * v) >> group) & ONES) << 4
    else:
        _read_q6(file, at, group, q)


# ---- q -> tile ----


@jit
def _write_group(bits: int, q: Words, arena: Bytes, at: int, row: int) -> None:
    """Puts the q of one row into the group that begins at byte ``at``."""
    at += 4 * row
    if bits == 8:
        for v in range(8):
            store_u32(arena, at + 64 * v, q[v])
        return
    for j in range(4):
        store_u32(arena, at + 64 * j, (q[2 * j] & LOW) | (q[2 * j + 1] & LOW) << 4)
    if bits == 5:
        fifths = np.uint32(0)
        for v in range(8):
            fifths |= ((q[v] >> 4) & ONES) << v
        store_u32(arena, at + 256, fifths)
    elif bits == 6:
        for half in range(2):
            pairs = np.uint32(0)
            for v in range(4):
                pairs |= ((q[4 * half + v] >> 4) & TWOS) << (2 * v)
            store_u32(arena, at + 256 + 64 * half, pairs)


@jit
def _write_scales(code: int, file: Bytes, block: int, group: int, arena: Bytes, header: int, at: int, row: int) -> None:
    """Scales and minimums of one row: f16 as they are, the 6 bits of Q4_K and Q5_K as bytes."""
    if code == _Q6_K:
        store_u16(arena, header + 2 * row, load_u16(file, block + 208))
        for half in range(2):
            arena[at + 16 * half + row] = file[block + 192 + 2 * group + half]
    elif code in (_Q4_K, _Q5_K):
        store_u16(arena, header + 2 * row, load_u16(file, block))
        store_u16(arena, header + 32 + 2 * row, load_u16(file, block + 2))
        # Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 the minimums; groups 4-7 have four bits in bytes
        # 8-11, scale low and minimum high, and their top two above those of group - 4.
        packed = block + 4 + group % 4
        if group < 4:
            scale, minimum = file[packed] & 63, file[packed + 4] & 63
        else:
            scale = (file[packed + 8] & 15) | (file[packed] >> 6) << 4
            minimum = (file[packed + 8] >> 4) | (file[packed + 4] >> 6) << 4
        arena[at + row] = scale
        arena[at + 16 + row] = minimum
    else:
        store_u16(arena, at + 2 * row, load_u16(file, block))
        if TABLE[code, OFFSET] == 0:
            store_u16(arena, at + 32 + 2 * row, load_u16(file, block + 2))


@jit
def _pack_row(code: int, file: Bytes, file_at: int, k: int, arena: Bytes, tile: int, row: int, q: Words) -> None:
    layout = TABLE[code]
    for _ in range(k // (GROUP * layout[BLOCK_GROUPS])):
        for group in range(layout[BLOCK_GROUPS]):
            at = tile + layout[HEADER] + group * layout[GROUP_BYTES]
            _read_group(code, file, file_at, group, q)
            _write_group(layout[BITS], q, arena, at, row)
            _write_scales(code, file, file_at, group, arena, tile, at + layout[VALUES], row)
        file_at += layout[FILE_BYTES]
        tile += layout[BLOCK_BYTES]


@jit
def _pack_floats(size: int, file: Bytes, file_at: int, k: int, arena: Bytes, tile: int, row: int) -> None:
    for i in range(k):
        if size == 4:
            store_u32(arena, tile + 4 * (ROWS * i + row), load_u32(file, file_at + 4 * i))
        else:
            store_u16(arena, tile + 2 * (ROWS * i + row), load_u16(file, file_at + 2 * i))


@entry("void(i8, Array(u1, 1, 'C', readonly=True), i8[::1], i8, u1[::1], i8, u4[::1])")
def _pack(code: int, file: Bytes, order: Order, k: int, arena: Bytes, offset: int, q: Words) -> None:
    """file [rows * row bytes], order [rows] -> arena[offset:]; q [8] is scratch."""
    layout = TABLE[code]
    size = layout[BITS] // 8
    row_bytes = k * size if code < FIRST_QUANTISED else k // (GROUP * layout[BLOCK_GROUPS]) * layout[FILE_BYTES]
    tile_bytes = tile_size(code, k)
    for row in range(len(order)):
        tile = offset + row // ROWS * tile_bytes
        if code < FIRST_QUANTISED:
            _pack_floats(size, file, order[row] * row_bytes, k, arena, tile, row % ROWS)
        else:
            _pack_row(code, file, order[row] * row_bytes, k, arena, tile, row % ROWS, q)


@jit
def tile_size(code: int, k: int) -> int:
    """Bytes of a tile of 16 rows and k columns."""
    layout = TABLE[code]
    if code < FIRST_QUANTISED:
        return k * layout[K_BYTES]
    return k // (GROUP * layout[BLOCK_GROUPS]) * layout[BLOCK_BYTES]


# ---- tile -> floats ----


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


# ---- floats -> file ----


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

"""The innermost loops of packing, one for each format: blocks of 16 rows of a file, to one tile.

A register holds the same four bytes of all 16 rows. The q of a group are eight of those, four values to each lane's
word, and a tile is made of nothing else: rows are interleaved by being gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from tlserve.kernels.emit import (
    COLUMNS,
    I8,
    I16,
    I32,
    I64,
    LANES,
    POINTER,
    STATIC,
    Static,
    c_call,
    columns_of,
    constant,
    i32x16,
    instruction,
    pointer_to,
    vector_of,
)
from tlserve.kernels.jit import Leaf
from tlserve.kernels.layout import ROWS, Layout

WORD = i32x16.llvm
LOW, ONES, TWOS = 0x0F0F0F0F, 0x01010101, 0x03030303  # of each byte of a word
SPREAD = 0x00204081  # times four bits: bit i becomes bit 0 of byte i, other bits come along
SIGNS = 0x80808080
VECTORS = 8

call_pack = c_call(3)


@cache
def pack_leaf(layout: Layout) -> Leaf:
    """void(rows, blocks, tile): addresses of 16 row addresses and of a tile; ``blocks`` counts k for float formats."""
    function = _quantised(layout) if layout.is_quantised else _floats(layout)
    return Leaf(f"pack-{layout.name}", function, types.void(types.int64, types.int64, types.int64))


def _quantised(layout: Layout) -> Callable[..., None]:
    static: Any = Static(layout)

    def pack(rows: int, blocks: int, tile: int) -> None:
        at = 0
        for _ in range(blocks):
            store_header(static, rows, 0, at, tile, 0)
            tile += static.header_bytes
            for group in range(static.block_groups):
                store_values(static, read_values(static, rows, 0, at, group), tile, 0)
                store_scales(static, rows, 0, at, group, tile, static.values_bytes)
                tile += static.group_bytes
            at += static.file_bytes

    return pack


def _floats(layout: Layout) -> Callable[..., None]:
    static: Any = Static(layout)
    all_bits, own_bits = Static(64), Static(layout.bits)
    together = 64 // layout.bits

    def pack(rows: int, blocks: int, tile: int) -> None:
        at = 0
        for _ in range(blocks // together):
            store_numbers(static, all_bits, rows, 0, at, tile, 0)
            at += 8
            tile += 8 * ROWS
        for _ in range(blocks % together):
            store_numbers(static, own_bits, rows, 0, at, tile, 0)
            at += static.file_bytes
            tile += static.k_bytes

    return pack


# ---- words of 16 rows ----


def _gather(b: Any, rows: Any, at: Any, start: Any, kind: ir.Type = I32) -> Any:
    """The number at byte at + start of each row, lane r from row r."""
    offset = b.add(at, ir.Constant(I64, start) if isinstance(start, int) else start)
    vector = ir.Constant(vector_of(kind), ir.Undefined)
    for row in range(ROWS):
        begin = b.load(b.gep(pointer_to(b, rows, I64), [ir.Constant(I64, row)]), align=8)
        number = b.load(b.inttoptr(b.add(begin, offset), ir.PointerType(kind)), align=1)
        vector = b.insert_element(vector, number, ir.Constant(I32, row))
    return vector


def _masked(b: Any, word: Any, right: Any, mask: int) -> Any:
    """(word >> right) & mask; right is a number or a word."""
    moved = b.lshr(word, constant(WORD, right) if isinstance(right, int) else right)
    return b.and_(moved, constant(WORD, mask))


def _or_left(b: Any, word: Any, other: Any, left: int) -> Any:
    return b.or_(word, b.shl(other, constant(WORD, left)))


def _splat(b: Any, number: Any) -> Any:
    """An int64 in every lane."""
    first = b.insert_element(ir.Constant(WORD, ir.Undefined), b.trunc(number, I32), ir.Constant(I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(vector_of(I32), [0] * LANES))


def _times(b: Any, number: Any, factor: int) -> Any:
    return b.mul(number, ir.Constant(I64, factor))


def _divided(b: Any, number: Any, power: int) -> tuple[Any, Any]:
    """Quotient and remainder of a division by 2 ** power."""
    return b.lshr(number, ir.Constant(I64, power)), b.and_(number, ir.Constant(I64, (1 << power) - 1))


# ---- the q of a group, as each format stores them ----


def _nibbles(b: Any, rows: Any, at: Any, start: int) -> list[Any]:
    """16 bytes: values 0..15 in the low halves, 16..31 in the high ones."""
    words = [_gather(b, rows, at, start + 4 * i) for i in range(4)]
    return [_masked(b, word, shift, LOW) for shift in (0, 4) for word in words]


def _with_fifths(b: Any, rows: Any, at: Any, start: int, low: list[Any]) -> list[Any]:
    """Bit i of the 32 at ``start`` belongs to value i."""
    bits = _gather(b, rows, at, start)
    fours = [_masked(b, bits, 4 * v, 15) for v in range(VECTORS)]
    spread = [b.and_(b.mul(four, constant(WORD, SPREAD)), constant(WORD, ONES)) for four in fours]
    return [_or_left(b, q, bit, 4) for q, bit in zip(low, spread, strict=True)]


def _k_nibbles(b: Any, rows: Any, at: Any, start: int, group: Any) -> list[Any]:
    """32 bytes for each two groups, the even one in the low halves."""
    pair, odd = _divided(b, group, 1)
    begin, shift = b.add(at, _times(b, pair, 32)), _splat(b, _times(b, odd, 4))
    return [_masked(b, _gather(b, rows, begin, start + 4 * v), shift, LOW) for v in range(VECTORS)]


def _with_k_fifths(b: Any, rows: Any, at: Any, start: int, group: Any, low: list[Any]) -> list[Any]:
    """Bit g of byte i belongs to value i of group g."""
    shift = _splat(b, group)
    bits = [_masked(b, _gather(b, rows, at, start + 4 * v), shift, ONES) for v in range(VECTORS)]
    return [_or_left(b, q, bit, 4) for q, bit in zip(low, bits, strict=True)]


def _q6(b: Any, rows: Any, at: Any, group: Any) -> list[Any]:
    """Four groups for each half of the block: 64 bytes of low halves, and 32 of bit pairs from byte 128 on."""
    half, part = _divided(b, group, 2)
    upper, odd = _divided(b, part, 1)
    low_at = b.add(at, b.add(_times(b, half, 64), _times(b, odd, 32)))
    low_shift, high_shift = _splat(b, _times(b, upper, 4)), _splat(b, _times(b, part, 2))
    high_at = b.add(at, _times(b, half, 32))
    values = []
    for v in range(VECTORS):
        low = _masked(b, _gather(b, rows, low_at, 4 * v), low_shift, LOW)
        high = _masked(b, _gather(b, rows, high_at, 128 + 4 * v), high_shift, TWOS)
        values.append(_or_left(b, low, high, 4))
    return values


@instruction(lambda layout: columns_of(i32x16, VECTORS), STATIC, POINTER, types.intp, types.intp)
def read_values(b: Any, layout: Layout, rows: Any, at: Any, group: Any) -> list[Any]:
    """The q of a group of the block at byte ``at`` of each row: word v of lane r holds k = 4 v..4 v + 3 of row r."""
    match layout.name:
        case "Q4_0":
            return _nibbles(b, rows, at, 2)
        case "Q4_1":
            return _nibbles(b, rows, at, 4)
        case "Q5_0":
            return _with_fifths(b, rows, at, 2, _nibbles(b, rows, at, 6))
        case "Q5_1":
            return _with_fifths(b, rows, at, 4, _nibbles(b, rows, at, 8))
        case "Q8_0":
            return [b.xor(_gather(b, rows, at, 2 + 4 * v), constant(WORD, SIGNS)) for v in range(VECTORS)]
        case "Q4_K":
            return _k_nibbles(b, rows, at, 16, group)
        case "Q5_K":
            return _with_k_fifths(b, rows, at, 16, group, _k_nibbles(b, rows, at, 48, group))
        case "Q6_K":
            return _q6(b, rows, at, group)
    raise AssertionError(layout.name)


# ---- to the tile ----


def _store(b: Any, pointer: Any, start: int, vector: Any) -> None:
    where = b.gep(pointer_to(b, pointer, I8), [ir.Constant(I64, start)])
    b.store(vector, pointer_to(b, where, vector.type), align=1)


@instruction(types.void, STATIC, COLUMNS, POINTER)
def store_values(b: Any, layout: Layout, values: list[Any], tile: Any) -> None:
    """The q of a group in the layout's own bits."""
    if layout.bits == 8:
        for v, q in enumerate(values):
            _store(b, tile, 64 * v, q)
        return
    for j in range(VECTORS // 2):
        low, high = (_masked(b, q, 0, LOW) for q in values[2 * j : 2 * j + 2])
        _store(b, tile, 64 * j, _or_left(b, low, high, 4))
    width = layout.bits - 4  # of what a plane holds of each q
    for plane in range(width):
        word = constant(WORD, 0)
        for v in range(VECTORS // width):
            upper = _masked(b, values[VECTORS // width * plane + v], 4, TWOS if width == 2 else ONES)
            word = _or_left(b, word, upper, width * v)
        _store(b, tile, 256 + 64 * plane, word)


def _k_scales(b: Any, rows: Any, at: Any, group: Any) -> tuple[Any, Any]:
    """6-bit scales and minimums of a group as words, from the 12 bytes at byte 4 of a block.

    Bytes 0-3 hold the scales of groups 0-3 and bytes 4-7 their minimums, in the low six bits. Groups 4-7 have
    their low four bits in bytes 8-11 (scale in the low half) and their top two bits above those of group - 4.
    """
    later, place = _divided(b, group, 2)
    begin = b.add(at, place)
    first, second, third = (b.zext(_gather(b, rows, begin, 4 + 4 * i, I8), WORD) for i in range(3))
    late_scale = _or_left(b, _masked(b, third, 0, 15), _masked(b, first, 6, 3), 4)
    late_minimum = _or_left(b, _masked(b, third, 4, 15), _masked(b, second, 6, 3), 4)
    is_late = b.icmp_unsigned("!=", later, ir.Constant(I64, 0))
    scale = b.select(is_late, late_scale, _masked(b, first, 0, 63))
    return scale, b.select(is_late, late_minimum, _masked(b, second, 0, 63))


@instruction(types.void, STATIC, POINTER, types.intp, types.intp, POINTER)
def store_scales(b: Any, layout: Layout, rows: Any, at: Any, group: Any, tile: Any) -> None:
    """Scales of a group, then its minimums or second scales."""
    if layout.halves:
        begin = b.add(at, _times(b, group, 2))
        for half in range(2):
            _store(b, tile, 16 * half, _gather(b, rows, begin, 192 + half, I8))
    elif layout.is_k:
        for i, small in enumerate(_k_scales(b, rows, at, group)):
            _store(b, tile, 16 * i, b.trunc(small, vector_of(I8)))
    else:
        for i in range(1 if layout.offset else 2):
            _store(b, tile, 32 * i, _gather(b, rows, at, 2 * i, I16))


@instruction(types.void, STATIC, POINTER, types.intp, POINTER)
def store_header(b: Any, layout: Layout, rows: Any, at: Any, tile: Any) -> None:
    """Super scales of a block, and those of its minimums."""
    if layout.is_k:
        for i, start in enumerate([208] if layout.halves else [0, 2]):
            _store(b, tile, 32 * i, _gather(b, rows, at, start, I16))


@instruction(types.void, STATIC, STATIC, POINTER, types.intp, POINTER)
def store_numbers(b: Any, layout: Layout, bits: int, rows: Any, at: Any, tile: Any) -> None:
    """As many k of a float layout as ``bits`` hold, from byte ``at`` of each row."""
    words = _gather(b, rows, at, 0, ir.IntType(bits))
    for i in range(bits // layout.bits):
        number = words if bits == layout.bits else b.lshr(words, constant(words.type, layout.bits * i))
        number = b.trunc(number, vector_of(ir.IntType(layout.bits))) if bits > layout.bits else number
        _store(b, tile, layout.k_bytes * i, number)

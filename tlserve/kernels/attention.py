"""Paged attention with grouped queries: one source for prompts and single tokens, the same bits for both.

Layout of the cache. A KV block holds ``block_size`` tokens of every layer and head, as sub-blocks of 16 tokens.
A sub-block is ``keys [width][16]`` then ``values [16][width]``, where width is head_dim rounded up to 16: scores
of 16 tokens need no sum over lanes, and neither does the weighted sum of values. ``kv`` is an array of float32, or of
uint16 that hold f16; places in it count its numbers.

Numerics. For one query the positions 0..p are visited in order, in chunks of up to CHUNK tokens that begin at a
multiple of CHUNK: scores (one fma per dimension, in order), the largest so far, then every weight
exp(score - largest), the sum of weights per lane (position mod 16), and one fma per token for each dimension.
When the largest grows, what was summed is scaled by exp(old - new). None of this depends on which queries share
a tile: a tile's queries all end in the same sub-block, so they visit the same chunks, and what lies past a
query's own position has weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from tlserve.kernels.emit import (
    COLUMNS,
    F32,
    I32,
    I64,
    LANES,
    POINTER,
    STATIC,
    Static,
    broadcast,
    columns_of,
    constant,
    f32x16,
    instruction,
    pointer_to,
)
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.simd import (
    emit_f32_to_f16,
    emit_fma,
    load_f16,
    load_f32,
    load_f32_first,
    max_lanes,
    maximum,
    minimum,
    splat,
    store_f16,
    store_f32,
    store_f32_first,
    sum_lanes,
)

SUB_BLOCK = 16  # tokens whose scores are one register
CHUNK = 64  # tokens between two looks at the largest score
TILE = 16  # most queries that share a load of keys and values
MAX_F16 = np.float32(65504.0)
NEVER = np.float32(-np.inf)


@register_jitable
def padded_head(head_dim):
    return (head_dim + 15) // 16 * 16


@register_jitable
def sub_block_size(head_dim):
    """Numbers in the keys and values of 16 tokens of one head."""
    return 2 * SUB_BLOCK * padded_head(head_dim)


@register_jitable
def scratch_floats(head_dim):
    """Floats of scratch that attend needs."""
    return TILE * (head_dim + CHUNK + padded_head(head_dim) + LANES) + 2 * LANES


# ---- tiles: a register for each of several queries ----


@dataclass(frozen=True)
class Width:
    """A tile's number of queries, which its code is made for."""

    queries: int


ONE, FOUR, EIGHT, SIXTEEN = (Static(Width(queries)) for queries in (1, 4, 8, 16))


def _tile(width: Width) -> types.Type:
    return columns_of(f32x16, width.queries)


def _places(b: Any, pointer: Any, stride: Any, count: int) -> list[Any]:
    return [b.gep(pointer, [b.mul(stride, ir.Constant(I64, i))]) for i in range(count)]


@instruction(_tile, STATIC)
def zero_tile(b: Any, width: Width) -> list[Any]:
    """Zeros for every query."""
    return [constant(f32x16.llvm, 0.0)] * width.queries


@instruction(_tile, STATIC, POINTER, types.intp)
def load_tile(b: Any, width: Width, pointer: Any, stride: Any) -> list[Any]:
    """The register of query i from array[index + i * stride:]."""
    places = _places(b, pointer, stride, width.queries)
    return [b.load(pointer_to(b, place, f32x16.llvm), align=4) for place in places]


@instruction(types.void, COLUMNS, POINTER, types.intp)
def store_tile(b: Any, tile: list[Any], pointer: Any, stride: Any) -> None:
    """array[index + i * stride:] = the register of query i."""
    for register, place in zip(tile, _places(b, pointer, stride, len(tile)), strict=True):
        b.store(register, pointer_to(b, place, f32x16.llvm), align=4)


def _scalar(b: Any, place: Any) -> Any:
    return broadcast(b, b.load(pointer_to(b, place, F32), align=4))


@instruction(lambda tile: tile, COLUMNS, f32x16, POINTER, types.intp)
def fma_tile(b: Any, tile: list[Any], vector: Any, pointer: Any, stride: Any) -> list[Any]:
    """Adds vector * array[index + i * stride] to the register of query i."""
    places = _places(b, pointer, stride, len(tile))
    return [emit_fma(b, vector, _scalar(b, place), register) for register, place in zip(tile, places, strict=True)]


@instruction(lambda tile: tile, COLUMNS, POINTER)
def scale_tile(b: Any, tile: list[Any], pointer: Any) -> list[Any]:
    """Multiplies the register of query i by array[index + i]."""
    places = _places(b, pointer, ir.Constant(I64, 1), len(tile))
    return [b.fmul(register, _scalar(b, place)) for register, place in zip(tile, places, strict=True)]


# ---- the cache ----


@intrinsic  # type: ignore[untyped-decorator]
def _scatter(typingctx: Any, kv: Any, at: Any, vector: Any) -> Any:
    """kv[at + 16 * i] = lane i"""

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        numbers = values[2] if sig.args[0].dtype == types.float32 else emit_f32_to_f16(b, values[2])
        data = context.make_array(sig.args[0])(context, b, values[0]).data
        for i, place in enumerate(_places(b, b.gep(data, [values[1]]), ir.Constant(I64, LANES), LANES)):
            b.store(b.extract_element(numbers, ir.Constant(I32, i)), place)
        return context.get_dummy_value()

    return types.void(kv, types.intp, f32x16), lower


@inline
def _load_numbers(kv, at):
    return load_f16(kv, at) if kv.itemsize == 2 else load_f32(kv, at)


@jit
def write_kv(is_key, kv, sub_block, offset, head_dim, x, x_at):
    """Keeps one head's key or value x[x_at:] of a token at ``offset`` 0..15 of a sub-block.

    What an f16 cannot hold becomes its largest (in f32 too): an infinity would spoil sums it has no weight in.
    """
    limit = splat(MAX_F16)
    for d in range(0, head_dim, LANES):
        vector = load_f32_first(x, x_at + d, np.int32(min(LANES, head_dim - d)))
        vector = maximum(minimum(vector, limit), splat(-MAX_F16))
        at = sub_block + (LANES + offset) * padded_head(head_dim) + d
        if is_key:
            _scatter(kv, sub_block + d * LANES + offset, vector)
        elif kv.itemsize == 2:
            store_f16(kv, at, vector)
        else:
            store_f32(kv, at, vector)


@inline
def sub_block_at(table, row, position, block_size, block_stride, sub_size):
    """Where, within one layer and head, the sub-block is that holds ``position`` of the request in ``row``."""
    block = np.int64(table[row, position // block_size])
    return block * block_stride + position % block_size // SUB_BLOCK * sub_size


# ---- attention ----


@jit
def _pack_queries(width, q, q_at, q_row, head_dim, scale, group, first, count, packed):
    """packed[d * W + i] = dimension d of query first + i, scaled; zero past ``count``."""
    for i in range(width.queries):
        at = q_at + (first + i) // group * q_row + (first + i) % group * head_dim
        for d in range(head_dim):
            packed[d * width.queries + i] = q[at + d] * scale if i < count else np.float32(0.0)


@jit
def _score(width, packed, kv, at, head_dim, scores, column):
    """scores[i * CHUNK + column : + 16] = query i times the keys of the sub-block at ``at``."""
    tile = zero_tile(width)
    for d in range(head_dim):
        key = _load_numbers(kv, at + d * LANES)
        tile = fma_tile(tile, key, packed, d * width.queries, 1)
    store_tile(tile, scores, column, CHUNK)


@jit
def _soften(width, scores, num_subs, largest, decay, sums):
    """Scores to weights, under a new largest; ``decay`` is what earlier sums are to be scaled by."""
    for i in range(width.queries):
        top = load_f32(scores, i * CHUNK)
        for j in range(1, num_subs):
            top = maximum(load_f32(scores, i * CHUNK + j * LANES), top)
        decay[i] = max(largest[i], max_lanes(top))
    new = load_f32(decay, 0)
    store_f32(decay, 0, exp16(load_f32(largest, 0) - new))
    store_f32(largest, 0, new)
    for i in range(width.queries):
        total = load_f32(sums, i * LANES) * splat(decay[i])
        for j in range(num_subs):
            weight = exp16(load_f32(scores, i * CHUNK + j * LANES) - splat(largest[i]))
            store_f32(scores, i * CHUNK + j * LANES, weight)
            total = total + weight
        store_f32(sums, i * LANES, total)


@jit
def _add_values(width, kv, at, head_dim, num_keys, scores, column, summed):
    """Adds the weighted values of the first ``num_keys`` tokens of the sub-block at ``at``."""
    row = padded_head(head_dim)
    for d in range(0, row, LANES):
        tile = load_tile(width, summed, d * width.queries, LANES)
        first = at + LANES * row + d
        for key in range(num_keys):
            value = _load_numbers(kv, first + key * row)
            tile = fma_tile(tile, value, scores, column + key, CHUNK)
        store_tile(tile, summed, d * width.queries, LANES)


@jit
def _decay_values(width, head_dim, decay, summed):
    for d in range(0, padded_head(head_dim), LANES):
        tile = load_tile(width, summed, d * width.queries, LANES)
        store_tile(scale_tile(tile, decay, 0), summed, d * width.queries, LANES)


@jit
def _attend_tile(
    width, q, q_at, q_row, group, head_dim, scale, first, count, position,
    kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
):  # fmt: skip
    """attend for queries first .. first + count, count <= W; query i is token i // group, head i % group."""
    w, size = width.queries, sub_block_size(head_dim)
    packed, scratch = scratch[: w * head_dim], scratch[w * head_dim :]
    scores, scratch = scratch[: w * CHUNK], scratch[w * CHUNK :]
    summed, scratch = scratch[: w * padded_head(head_dim)], scratch[w * padded_head(head_dim) :]
    sums, scratch = scratch[: w * LANES], scratch[w * LANES :]
    largest, decay = scratch[:LANES], scratch[LANES : 2 * LANES]
    _pack_queries(width, q, q_at, q_row, head_dim, scale, group, first, count, packed)
    summed[:] = 0
    sums[:] = 0
    largest[:] = NEVER
    decay[:] = 0
    last = position + (first + count - 1) // group
    for start in range(0, last + 1, CHUNK):
        num_subs = min(CHUNK, last - start + LANES) // LANES
        for j in range(num_subs):
            at = base + sub_block_at(table, row, start + j * LANES, block_size, block_stride, size)
            _score(width, packed, kv, at, head_dim, scores, j * LANES)
        if start + CHUNK > last:
            for i in range(count):
                visible = (position + (first + i) // group) % LANES + 1
                scores[i * CHUNK + (num_subs - 1) * LANES + visible : i * CHUNK + num_subs * LANES] = NEVER
        _soften(width, scores, num_subs, largest, decay, sums)
        _decay_values(width, head_dim, decay, summed)
        for j in range(num_subs):
            at = base + sub_block_at(table, row, start + j * LANES, block_size, block_stride, size)
            num_keys = min(LANES, last + 1 - start - j * LANES)
            _add_values(width, kv, at, head_dim, num_keys, scores, j * LANES, summed)
    for i in range(count):
        share = splat(np.float32(1.0) / sum_lanes(load_f32(sums, i * LANES)))
        at = out_at + (first + i) // group * out_row + (first + i) % group * head_dim
        for d in range(0, head_dim, LANES):
            # Adding 0 makes a sum's -0 a 0: which of them it is could depend on the tile.
            value = load_f32(summed, d * w + i * LANES) * share + splat(np.float32(0.0))
            store_f32_first(out, at + d, value, np.int32(min(LANES, head_dim - d)))


@jit
def attend(
    q, q_at, q_row, num_tokens, group, head_dim, scale, position,
    kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
):  # fmt: skip
    """Attention of ``group`` query heads over one head of keys, for tokens of one request in one sub-block.

    q [num_tokens, group, head_dim] starts at q_at and out at out_at, rows of tokens q_row and out_row apart. Token t
    stands at ``position + t`` and sees 0..position + t of the request whose blocks are table[row]; ``base`` is where
    this layer and head begin in block 0, blocks are block_stride apart. All tokens lie in one aligned run of 16
    positions.
    """
    first, n = 0, num_tokens * group
    while first < n:
        count = min(TILE, n - first)
        if count > 8:
            _attend_tile(
                SIXTEEN, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
            )  # fmt: skip
        elif count > 4:
            _attend_tile(
                EIGHT, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
            )  # fmt: skip
        elif count > 1:
            _attend_tile(
                FOUR, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
            )  # fmt: skip
        else:
            _attend_tile(
                ONE, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_stride, out, out_at, out_row, scratch,
            )  # fmt: skip
        first += count

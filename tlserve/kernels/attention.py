"""Paged attention with grouped queries: one source for prompts and single tokens, the same bits for both.

Numerics. For one query the positions 0..p are visited in order, in chunks of up to CHUNK tokens that begin at a
multiple of CHUNK: scores (one fma per dimension, in order), the largest so far, then every weight
exp(score - largest), the sum of weights per lane (position mod 16), and one fma per token for each dimension.
When the largest grows, what was summed is scaled by exp(old - new). None of this depends on which queries share
a tile: a tile's queries all end in the same sub-block, so they visit the same chunks, and what lies past a
query's own position has weight zero.

A tile's kernel is a leaf, compiled for its number of queries; a model needs two, for prompts and for single tokens.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import (
    COLUMNS,
    F32,
    I8,
    I64,
    LANES,
    POINTER,
    STATIC,
    Static,
    address,
    broadcast,
    c_call,
    columns_of,
    constant,
    f32x16,
    instruction,
    pointer_to,
)
from tlserve.kernels.jit import Leaf, inline, jit
from tlserve.kernels.kv_cache import SUB_BLOCK, load_numbers, padded_head, sub_block_at, sub_block_bytes
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.product import set_f32
from tlserve.kernels.simd import (
    emit_fma,
    load_f32,
    max_lanes,
    maximum,
    prefetch,
    scalar_f32,
    scalar_i32,
    splat,
    store_f32,
    store_f32_first,
    sum_lanes,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Tables = NDArray[np.int32]  # [requests, blocks of one]

CHUNK = 64  # tokens between two looks at the largest score
WIDTHS = (1, 4, 8, 16)  # queries that share a load of keys and values
WIDEST = 16
LINE = 64  # bytes of a cache line: an f16 sub-block has as many as a head has dimensions
NEVER = np.float32(-np.inf)


def scratch_floats(head_dim: int) -> int:
    """Floats of scratch that attend needs."""
    return WIDEST * (head_dim + CHUNK + padded_head(head_dim) + LANES) + 2 * LANES


# ---- tiles: a register for each of several queries ----


@dataclass(frozen=True)
class Tile:
    """What a tile's code is made for."""

    queries: int
    number_bytes: int  # 2 = f16, 4 = f32


def _tile(tile: Tile) -> types.Type:
    return columns_of(f32x16, tile.queries)


def _places(b: Any, pointer: Any, stride: Any, count: int) -> list[Any]:
    return [b.gep(pointer_to(b, pointer, I8), [b.mul(stride, ir.Constant(I64, 4 * i))]) for i in range(count)]


@instruction(_tile, STATIC)
def zero_tile(b: Any, tile: Tile) -> list[Any]:
    """Zeros for every query."""
    return [constant(f32x16.llvm, 0.0)] * tile.queries


@instruction(_tile, STATIC, POINTER, types.intp)
def load_tile(b: Any, tile: Tile, pointer: Any, stride: Any) -> list[Any]:
    """The register of query i from ``i * stride`` floats after the pointer."""
    places = _places(b, pointer, stride, tile.queries)
    return [b.load(pointer_to(b, place, f32x16.llvm), align=4) for place in places]


@instruction(types.void, COLUMNS, POINTER, types.intp)
def store_tile(b: Any, tile: list[Any], pointer: Any, stride: Any) -> None:
    """Writes the register of query i to ``i * stride`` floats after the pointer."""
    for register, place in zip(tile, _places(b, pointer, stride, len(tile)), strict=True):
        b.store(register, pointer_to(b, place, f32x16.llvm), align=4)


def _scalar(b: Any, place: Any) -> Any:
    return broadcast(b, b.load(pointer_to(b, place, F32), align=4))


@instruction(lambda tile: tile, COLUMNS, f32x16, POINTER, types.intp)
def fma_tile(b: Any, tile: list[Any], vector: Any, pointer: Any, stride: Any) -> list[Any]:
    """Adds vector times the float that is ``i * stride`` floats after the pointer to the register of query i."""
    places = _places(b, pointer, stride, len(tile))
    return [emit_fma(b, vector, _scalar(b, place), register) for register, place in zip(tile, places, strict=True)]


@instruction(lambda tile: tile, COLUMNS, POINTER)
def scale_tile(b: Any, tile: list[Any], pointer: Any) -> list[Any]:
    """Multiplies the register of query i by the i-th float at the pointer."""
    places = _places(b, pointer, ir.Constant(I64, 1), len(tile))
    return [b.fmul(register, _scalar(b, place)) for register, place in zip(tile, places, strict=True)]


# ---- one tile ----


@inline
def _find(table: int, position: int, block_size: int, block_stride: int, sub_bytes: int) -> int:
    """The same, where ``table`` is the address of the blocks of a request."""
    block = scalar_i32(table, 4 * (position // block_size))
    return sub_block_at(block, position, block_size, block_stride, sub_bytes)


@jit
def _pack_queries(
    tile: Any, q: int, q_row: int, group: int, head_dim: int, first: int, count: int, packed: int
) -> None:
    """Dimension d of query first + i, scaled, as float d * queries + i; zero past ``count``."""
    scale = np.float32(1.0) / np.float32(np.sqrt(np.float32(head_dim)))
    for i in range(tile.queries):
        at = (first + i) // group * q_row + 4 * ((first + i) % group * head_dim)
        for d in range(head_dim):
            value = scalar_f32(q, at + 4 * d) * scale if i < count else np.float32(0.0)
            set_f32(packed, 4 * (d * tile.queries + i), value)


@inline
def _score(tile: Any, packed: int, kv: int, head_dim: int, scores: int) -> None:
    """Scores of every query and the 16 tokens of a sub-block."""
    sums = zero_tile(tile)
    for d in range(head_dim):
        sums = fma_tile(sums, load_numbers(tile, kv, d * LANES * tile.number_bytes), packed, 4 * d * tile.queries, 1)
    store_tile(sums, scores, 0, CHUNK)


@inline
def _score_four(
    tile: Any, packed: int, kv0: int, kv1: int, kv2: int, kv3: int, head_dim: int, scores: int,
    next0: int, next1: int, next2: int, next3: int,
) -> None:  # fmt: skip
    """The same for four sub-blocks, so that a narrow tile has enough sums to wait for; fetches the next four.

    Single tokens read the whole cache once, and blocks are too short for the hardware to see the stream.
    """
    sums0 = sums1 = sums2 = sums3 = zero_tile(tile)
    for d in range(head_dim):
        prefetch(next0, d * LINE)
        prefetch(next1, d * LINE)
        prefetch(next2, d * LINE)
        prefetch(next3, d * LINE)
        key, query = d * LANES * tile.number_bytes, 4 * d * tile.queries
        sums0 = fma_tile(sums0, load_numbers(tile, kv0, key), packed, query, 1)
        sums1 = fma_tile(sums1, load_numbers(tile, kv1, key), packed, query, 1)
        sums2 = fma_tile(sums2, load_numbers(tile, kv2, key), packed, query, 1)
        sums3 = fma_tile(sums3, load_numbers(tile, kv3, key), packed, query, 1)
    store_tile(sums0, scores, 0, CHUNK)
    store_tile(sums1, scores, 4 * LANES, CHUNK)
    store_tile(sums2, scores, 8 * LANES, CHUNK)
    store_tile(sums3, scores, 12 * LANES, CHUNK)


@jit
def _soften(tile: Any, scores: int, num_subs: int, largest: int, decay: int, sums: int) -> None:
    """Scores to weights, under a new largest; ``decay`` is what earlier sums are to be scaled by."""
    for i in range(tile.queries):
        top = load_f32(scores, 4 * i * CHUNK)
        for j in range(1, num_subs):
            top = maximum(load_f32(scores, 4 * (i * CHUNK + j * LANES)), top)
        set_f32(decay, 4 * i, max(scalar_f32(largest, 4 * i), max_lanes(top)))
    new = load_f32(decay, 0)
    store_f32(decay, 0, exp16(load_f32(largest, 0) - new))
    store_f32(largest, 0, new)
    for i in range(tile.queries):
        total = load_f32(sums, 4 * i * LANES) * splat(scalar_f32(decay, 4 * i))
        subtracted = splat(scalar_f32(largest, 4 * i))
        for j in range(num_subs):
            at = 4 * (i * CHUNK + j * LANES)
            weight = exp16(load_f32(scores, at) - subtracted)
            store_f32(scores, at, weight)
            total = total + weight
        store_f32(sums, 4 * i * LANES, total)


@inline
def _add_values(tile: Any, kv: int, row_bytes: int, num_keys: int, scores: int, summed: int, decay: int) -> None:
    """Adds the weighted values of ``num_keys`` tokens, 16 dimensions of them, to what was summed times ``decay``."""
    sums = scale_tile(load_tile(tile, summed, 0, LANES), decay, 0)
    for key in range(num_keys):
        sums = fma_tile(sums, load_numbers(tile, kv, key * row_bytes), scores, 4 * key, CHUNK)
    store_tile(sums, summed, 0, LANES)


@inline
def _add_values_four(tile: Any, kv: int, row_bytes: int, num_keys: int, scores: int, summed: int, decay: int) -> None:
    """The same for 64 dimensions, so that a narrow tile has enough sums to wait for."""
    step, bytes_ = 4 * tile.queries * LANES, LANES * tile.number_bytes
    sums0 = scale_tile(load_tile(tile, summed, 0, LANES), decay, 0)
    sums1 = scale_tile(load_tile(tile, summed, step, LANES), decay, 0)
    sums2 = scale_tile(load_tile(tile, summed, 2 * step, LANES), decay, 0)
    sums3 = scale_tile(load_tile(tile, summed, 3 * step, LANES), decay, 0)
    for key in range(num_keys):
        at, weight = key * row_bytes, 4 * key
        sums0 = fma_tile(sums0, load_numbers(tile, kv, at), scores, weight, CHUNK)
        sums1 = fma_tile(sums1, load_numbers(tile, kv, at + bytes_), scores, weight, CHUNK)
        sums2 = fma_tile(sums2, load_numbers(tile, kv, at + 2 * bytes_), scores, weight, CHUNK)
        sums3 = fma_tile(sums3, load_numbers(tile, kv, at + 3 * bytes_), scores, weight, CHUNK)
    store_tile(sums0, summed, 0, LANES)
    store_tile(sums1, summed, step, LANES)
    store_tile(sums2, summed, 2 * step, LANES)
    store_tile(sums3, summed, 3 * step, LANES)


@jit
def _add_sub_block(tile: Any, kv: int, head_dim: int, num_keys: int, scores: int, summed: int, decay: int) -> None:
    """Every dimension of the values of one sub-block."""
    row = padded_head(head_dim)
    row_bytes, d = row * tile.number_bytes, 0
    if tile.queries <= 4:
        while d + 4 * LANES <= row:
            at = kv + (LANES * row + d) * tile.number_bytes
            _add_values_four(tile, at, row_bytes, num_keys, scores, summed + 4 * d * tile.queries, decay)
            d += 4 * LANES
    while d < row:
        at = kv + (LANES * row + d) * tile.number_bytes
        _add_values(tile, at, row_bytes, num_keys, scores, summed + 4 * d * tile.queries, decay)
        d += LANES


@jit
def _finish(
    tile: Any, head_dim: int, group: int, first: int, count: int, sums: int, summed: int, out: int, out_row: int
) -> None:
    for i in range(count):
        share = splat(np.float32(1.0) / sum_lanes(load_f32(sums, 4 * i * LANES)))
        at = (first + i) // group * out_row + 4 * ((first + i) % group * head_dim)
        for d in range(0, head_dim, LANES):
            # Adding 0 makes a sum's -0 a 0: which of them it is could depend on the tile.
            value = load_f32(summed, 4 * (d * tile.queries + i * LANES)) * share + splat(np.float32(0.0))
            store_f32_first(out, at + 4 * d, value, np.int32(min(LANES, head_dim - d)))


def _attend_tile(made_for: Tile) -> Callable[..., None]:
    """The leaf that does queries first .. first + count of ``attend``; query i is token i // group, head i % group.

    All arguments are int64; places are addresses and strides are bytes.
    """
    tile: Any = Static(made_for)

    def attend_tile(
        q: int, q_row: int, group: int, head_dim: int, first: int, count: int, position: int,
        kv: int, table: int, block_size: int, block_stride: int, out: int, out_row: int, scratch: int,
    ) -> None:  # fmt: skip
        n, sub_bytes = tile.queries, sub_block_bytes(head_dim, tile.number_bytes)
        packed = scratch
        scores = packed + 4 * n * head_dim
        summed = scores + 4 * n * CHUNK
        sums = summed + 4 * n * padded_head(head_dim)
        largest = sums + 4 * n * LANES
        decay = largest + 4 * LANES
        _pack_queries(tile, q, q_row, group, head_dim, first, count, packed)
        for at in range(summed, largest, 4 * LANES):
            store_f32(at, 0, splat(np.float32(0.0)))
        store_f32(largest, 0, splat(NEVER))
        store_f32(decay, 0, splat(np.float32(0.0)))
        last = position + (first + count - 1) // group
        for start in range(0, last + 1, CHUNK):
            num_subs = min(CHUNK, last - start + SUB_BLOCK) // SUB_BLOCK
            following = start + CHUNK if start + CHUNK <= last - CHUNK else start
            sub0 = kv + _find(table, start, block_size, block_stride, sub_bytes)
            if n <= 4 and num_subs == 4:
                next0 = kv + _find(table, following, block_size, block_stride, sub_bytes)
                sub1 = kv + _find(table, start + SUB_BLOCK, block_size, block_stride, sub_bytes)
                sub2 = kv + _find(table, start + 2 * SUB_BLOCK, block_size, block_stride, sub_bytes)
                sub3 = kv + _find(table, start + 3 * SUB_BLOCK, block_size, block_stride, sub_bytes)
                next1 = kv + _find(table, following + SUB_BLOCK, block_size, block_stride, sub_bytes)
                next2 = kv + _find(table, following + 2 * SUB_BLOCK, block_size, block_stride, sub_bytes)
                next3 = kv + _find(table, following + 3 * SUB_BLOCK, block_size, block_stride, sub_bytes)
                _score_four(tile, packed, sub0, sub1, sub2, sub3, head_dim, scores, next0, next1, next2, next3)
            else:
                for j in range(num_subs):
                    sub = kv + _find(table, start + j * SUB_BLOCK, block_size, block_stride, sub_bytes)
                    _score(tile, packed, sub, head_dim, scores + 4 * j * LANES)
            if start + CHUNK > last:
                for i in range(count):
                    seen = (position + (first + i) // group) % SUB_BLOCK + 1
                    for lane in range(seen, SUB_BLOCK):
                        set_f32(scores, 4 * (i * CHUNK + (num_subs - 1) * LANES + lane), NEVER)
            _soften(tile, scores, num_subs, largest, decay, sums)
            for j in range(num_subs):
                num_keys = min(SUB_BLOCK, last + 1 - start - j * SUB_BLOCK)
                sub = kv + _find(table, start + j * SUB_BLOCK, block_size, block_stride, sub_bytes)
                _add_sub_block(tile, sub, head_dim, num_keys, scores + 4 * j * LANES, summed, decay)
                store_f32(decay, 0, splat(np.float32(1.0)))
        _finish(tile, head_dim, group, first, count, sums, summed, out, out_row)

    return attend_tile


_ARGUMENTS = 14
_call_tile = c_call(_ARGUMENTS)


@cache
def _leaf(tile: Tile) -> Leaf:
    name = f"attend-{tile.queries}-f{8 * tile.number_bytes}"
    return Leaf(name, _attend_tile(tile), types.void(*[types.int64] * _ARGUMENTS))


def attention_leaves(group: int, number_bytes: int) -> list[Leaf]:
    """The kernels for ``group`` query heads to one head of keys, for ``jit.compile_all``: single tokens, prompts."""
    narrow = next((width for width in WIDTHS if width >= group), WIDEST)
    return [_leaf(Tile(width, number_bytes)) for width in (narrow, WIDEST)]


def attention_addresses(group: int, number_bytes: int) -> NDArray[np.int64]:
    """What attend needs to know of these kernels: width and address of each, narrow first."""
    leaves = attention_leaves(group, number_bytes)
    narrow = next((width for width in WIDTHS if width >= group), WIDEST)
    return np.array([[narrow, leaves[0].address], [WIDEST, leaves[1].address]], np.int64)


@jit
def attend(
    kernels: Numbers, q: Floats, q_at: int, q_row: int, num_tokens: int, group: int, head_dim: int, position: int,
    kv: Bytes, base: int, table: Tables, row: int, block_size: int, block_stride: int,
    out: Floats, out_at: int, out_row: int, scratch: Floats,
) -> None:  # fmt: skip
    """Attention of ``group`` query heads over one head of keys, for tokens of one request in one sub-block.

    q [num_tokens, group, head_dim] starts at q[q_at] and out at out[out_at], tokens q_row and out_row floats apart.
    Token t stands at ``position + t`` and sees 0..position + t of the request whose blocks are table[row]; ``base`` is
    the byte of kv where this layer and head begin in block 0, blocks are block_stride bytes apart. All tokens lie in
    one aligned run of 16 positions. ``kernels`` are attention_addresses'; scratch has scratch_floats.
    """
    first, n = 0, num_tokens * group
    while first < n:
        width, kernel = kernels[0] if n - first <= kernels[0, 0] else kernels[1]
        count = min(width, n - first)
        _call_tile(
            kernel, address(q, q_at), 4 * q_row, group, head_dim, first, count, position, address(kv, base),
            address(table, row * table.shape[1]), block_size, block_stride, address(out, out_at), 4 * out_row,
            address(scratch, 0),
        )  # fmt: skip
        first += count

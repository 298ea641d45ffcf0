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
    emit_scatter,
    load_f32,
    load_f32_first,
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

SUBS = 4  # sub-blocks that a narrow tile scores together
CHUNK = SUBS * SUB_BLOCK  # tokens between two looks at the largest score
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # queries that share a load of keys and values
WIDEST = 16
LINE = 64  # bytes of a cache line
NEVER = np.float32(-np.inf)


def scratch_floats(head_dim: int) -> int:
    """Floats of scratch that attend needs."""
    return WIDEST * (2 * padded_head(head_dim) + CHUNK + LANES) + 3 * LANES


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


@instruction(types.void, STATIC, POINTER, f32x16)
def _scatter(b: Any, tile: Tile, pointer: Any, vector: Any) -> None:
    """Lane i to the float that is ``i * queries`` floats after the pointer."""
    emit_scatter(b, pointer, vector, tile.queries)


@instruction(types.int64, types.int64, types.int64)
def _place(b: Any, places: Any, j: Any) -> Any:
    """The j-th of the addresses that lie at ``places``."""
    return b.load(b.gep(b.inttoptr(places, ir.PointerType(I64)), [j]), align=8)


@instruction(types.void, types.int64, types.int64, types.int64)
def _set_place(b: Any, places: Any, j: Any, value: Any) -> None:
    b.store(value, b.gep(b.inttoptr(places, ir.PointerType(I64)), [j]), align=8)


@jit
def _find_chunk(
    places: int, kv: int, table: int, start: int, last: int, block_size: int, block_stride: int, sub_bytes: int
) -> None:
    """Writes the addresses of the sub-blocks of the chunk at ``start``; past ``last`` that of the last one again.

    ``table`` is the address of the blocks of a request.
    """
    for j in range(SUBS):
        position = min(start + j * SUB_BLOCK, last)
        block = scalar_i32(table, 4 * (position // block_size))
        _set_place(places, j, kv + sub_block_at(block, position, block_size, block_stride, sub_bytes))


@jit
def _pack_queries(
    tile: Any, q: int, q_row: int, group: int, head_dim: int, first: int, count: int, packed: int
) -> None:
    """Dimension d of query first + i, scaled, as float d * queries + i; zero past ``count``."""
    scale = splat(np.float32(1.0) / np.float32(np.sqrt(np.float32(head_dim))))
    for i in range(tile.queries):
        at = (first + i) // group * q_row + 4 * ((first + i) % group * head_dim)
        for d in range(0, head_dim, LANES):
            size = head_dim - d if i < count else 0
            vector = load_f32_first(q, at + 4 * d, np.int32(min(LANES, size))) * scale
            _scatter(tile, packed, 4 * (d * tile.queries + i), vector)


@inline
def _fetch(tile: Any, places: int, step: int, at: int) -> None:
    """Asks for the ``step``th share of the sub-blocks' keys, or, ``at`` their values' place, of their values.

    The loops over a chunk's keys and values have as many steps as their heads have dimensions.
    """
    # A step takes a line of f16, or two of f32, of every other sub-block.
    lines, first = tile.number_bytes // 2, step % 2 * 2
    for j in range(first, first + 2):
        for line in range(step // 2 * lines, (step // 2 + 1) * lines):
            prefetch(_place(places, j), at + line * LINE)


@inline
def _score(tile: Any, packed: int, places: int, j: int, head_dim: int, scores: int, following: int) -> None:
    """Scores of every query and the 16 tokens of sub-block j; the first one fetches those that follow."""
    sums, kv = zero_tile(tile), _place(places, j)
    for d in range(head_dim):
        if j == 0 and tile.queries < WIDEST:
            _fetch(tile, following, d, 0)
            _fetch(tile, following, d, padded_head(head_dim) * LANES * tile.number_bytes)
        key = load_numbers(tile, kv, d * LANES * tile.number_bytes)
        sums = fma_tile(sums, key, packed, 4 * d * tile.queries, 1)
    store_tile(sums, scores, 4 * j * LANES, CHUNK)


@inline
def _score_four(tile: Any, packed: int, places: int, head_dim: int, scores: int, following: int) -> None:
    """The same for four sub-blocks, so that a narrow tile has enough sums to wait for."""
    sums0 = sums1 = sums2 = sums3 = zero_tile(tile)
    kv0, kv1, kv2, kv3 = _place(places, 0), _place(places, 1), _place(places, 2), _place(places, 3)
    for d in range(head_dim):
        _fetch(tile, following, d, 0)
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
def _add_values(
    tile: Any, places: int, at: int, row_bytes: int, num_keys: int, scores: int, summed: int, decay: int
) -> None:
    """Adds the weighted values of ``num_keys`` tokens, 16 dimensions of them, to what was summed times ``decay``."""
    sums = scale_tile(load_tile(tile, summed, 0, LANES), decay, 0)
    for start in range(0, num_keys, SUB_BLOCK):
        kv = _place(places, start // SUB_BLOCK) + at
        for key in range(min(SUB_BLOCK, num_keys - start)):
            sums = fma_tile(sums, load_numbers(tile, kv, key * row_bytes), scores, 4 * (start + key), CHUNK)
    store_tile(sums, summed, 0, LANES)


@inline
def _add_values_four(
    tile: Any, places: int, at: int, row_bytes: int, num_keys: int, scores: int, summed: int, decay: int,
    following: int, step: int,
) -> None:  # fmt: skip
    """The same for 64 dimensions, so that a narrow tile has enough sums to wait for."""
    stride, bytes_ = 4 * tile.queries * LANES, LANES * tile.number_bytes
    sums0 = scale_tile(load_tile(tile, summed, 0, LANES), decay, 0)
    sums1 = scale_tile(load_tile(tile, summed, stride, LANES), decay, 0)
    sums2 = scale_tile(load_tile(tile, summed, 2 * stride, LANES), decay, 0)
    sums3 = scale_tile(load_tile(tile, summed, 3 * stride, LANES), decay, 0)
    for start in range(0, num_keys, SUB_BLOCK):
        kv = _place(places, start // SUB_BLOCK) + at
        for key in range(min(SUB_BLOCK, num_keys - start)):
            row, weight = key * row_bytes, 4 * (start + key)
            if num_keys > CHUNK - SUB_BLOCK:  # the keys were fetched by ``_score_four``
                _fetch(tile, following, step + start + key, row_bytes * LANES)
            sums0 = fma_tile(sums0, load_numbers(tile, kv, row), scores, weight, CHUNK)
            sums1 = fma_tile(sums1, load_numbers(tile, kv, row + bytes_), scores, weight, CHUNK)
            sums2 = fma_tile(sums2, load_numbers(tile, kv, row + 2 * bytes_), scores, weight, CHUNK)
            sums3 = fma_tile(sums3, load_numbers(tile, kv, row + 3 * bytes_), scores, weight, CHUNK)
    store_tile(sums0, summed, 0, LANES)
    store_tile(sums1, summed, stride, LANES)
    store_tile(sums2, summed, 2 * stride, LANES)
    store_tile(sums3, summed, 3 * stride, LANES)


@jit
def _add_chunk(
    tile: Any, places: int, head_dim: int, num_keys: int, scores: int, summed: int, decay: int, following: int
) -> None:
    """Every dimension of the values of a chunk's tokens."""
    row = padded_head(head_dim)
    row_bytes, d = row * tile.number_bytes, 0
    if tile.queries <= 4:
        while d + 4 * LANES <= row:
            at = (LANES * row + d) * tile.number_bytes
            _add_values_four(
                tile, places, at, row_bytes, num_keys, scores, summed + 4 * d * tile.queries, decay, following, d
            )
            d += 4 * LANES
    while d < row:
        at = (LANES * row + d) * tile.number_bytes
        _add_values(tile, places, at, row_bytes, num_keys, scores, summed + 4 * d * tile.queries, decay)
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
        next_kv: int, next_table: int, next_last: int,
    ) -> None:  # fmt: skip
        n, sub_bytes = tile.queries, sub_block_bytes(head_dim, tile.number_bytes)
        here = scratch
        following = here + 8 * SUBS
        largest = scratch + 4 * LANES
        decay = largest + 4 * LANES
        sums = decay + 4 * LANES
        packed = sums + 4 * n * LANES
        scores = packed + 4 * n * padded_head(head_dim)
        summed = scores + 4 * n * CHUNK
        _pack_queries(tile, q, q_row, group, head_dim, first, count, packed)
        for i in range(n):
            store_f32(sums, 4 * i * LANES, splat(np.float32(0.0)))
        for at in range(summed, summed + 4 * n * padded_head(head_dim), 4 * LANES):
            store_f32(at, 0, splat(np.float32(0.0)))
        store_f32(largest, 0, splat(NEVER))
        store_f32(decay, 0, splat(np.float32(0.0)))
        last = position + (first + count - 1) // group
        _find_chunk(following, kv, table, 0, last, block_size, block_stride, sub_bytes)
        for start in range(0, last + 1, CHUNK):
            here, following = following, here
            if start + CHUNK <= last:
                _find_chunk(following, kv, table, start + CHUNK, last, block_size, block_stride, sub_bytes)
            else:
                _find_chunk(following, next_kv, next_table, 0, next_last, block_size, block_stride, sub_bytes)
            num_subs = min(CHUNK, last - start + SUB_BLOCK) // SUB_BLOCK
            if n <= 4 and num_subs == SUBS:
                _score_four(tile, packed, here, head_dim, scores, following)
            else:
                for j in range(num_subs):
                    _score(tile, packed, here, j, head_dim, scores, following)
            if start + CHUNK > last:
                for i in range(count):
                    seen = (position + (first + i) // group) % SUB_BLOCK + 1
                    for lane in range(seen, SUB_BLOCK):
                        set_f32(scores, 4 * (i * CHUNK + (num_subs - 1) * LANES + lane), NEVER)
            _soften(tile, scores, num_subs, largest, decay, sums)
            _add_chunk(tile, here, head_dim, min(CHUNK, last + 1 - start), scores, summed, decay, following)
        _finish(tile, head_dim, group, first, count, sums, summed, out, out_row)

    return attend_tile


_ARGUMENTS = 17
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
    out: Floats, out_at: int, out_row: int, scratch: Floats, next_base: int, next_row: int, next_last: int,
) -> None:  # fmt: skip
    """Attention of ``group`` query heads over one head of keys, for tokens of one request in one sub-block.

    q [num_tokens, group, head_dim] starts at q[q_at] and out at out[out_at], tokens q_row and out_row floats apart.
    Token t stands at ``position + t`` and sees 0..position + t of the request whose blocks are table[row]; ``base`` is
    the byte of kv where this layer and head begin in block 0, blocks are block_stride bytes apart. All tokens lie in
    one aligned run of 16 positions. ``kernels`` are attention_addresses'; scratch has scratch_floats. What comes next
    begins at ``next_base``, for positions 0..``next_last`` of table[next_row]; it is fetched ahead.
    """
    first, n = 0, num_tokens * group
    while first < n:
        width, kernel = kernels[0] if n - first <= kernels[0, 0] else kernels[1]
        count = min(width, n - first)
        base_after, row_after, last_after = base, row, position
        if first + count == n:
            base_after, row_after, last_after = next_base, next_row, next_last
        _call_tile(
            kernel, address(q, q_at), 4 * q_row, group, head_dim, first, count, position, address(kv, base),
            address(table, row * table.shape[1]), block_size, block_stride, address(out, out_at), 4 * out_row,
            address(scratch, 0), address(kv, base_after), address(table, row_after * table.shape[1]), last_after,
        )  # fmt: skip
        first += count

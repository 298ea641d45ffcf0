"""Paged attention with grouped queries: one source for prompts and single tokens, the same bits for both.

Layout of the cache. A KV block holds ``block_size`` tokens of every layer and head, as sub-blocks of 16 tokens.
A sub-block is ``keys [width][16]`` then ``values [16][width]``, where width is head_dim rounded up to 16: scores
of 16 tokens need no sum over lanes, and neither does the weighted sum of values. ``kv`` is a byte array; a number
is an f16 or an f32, and offsets are in bytes.

Numerics. For one query the positions 0..p are visited in order, in chunks of up to CHUNK tokens that begin at a
multiple of CHUNK: scores (one fma per dimension, in order), the largest so far, then every weight
exp(score - largest), the sum of weights per lane (position mod 16), and one fma per token for each dimension.
When the largest grows, what was summed is scaled by exp(old - new). None of this depends on which queries share
a tile: a tile's queries all end in the same sub-block, so they visit the same chunks, and what lies past a
query's own position has weight zero and is never read as a value by the sub-block's last query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tlserve.kernels.emit import F32, LANES, broadcast, constant, f32x16, pointer_to
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
TILE = 16  # queries that share a load of keys and values
MAX_F16 = np.float32(65504.0)
NEVER = np.float32(-np.inf)
W1, W4, W8, W16 = (0,) * 1, (0,) * 4, (0,) * 8, (0,) * 16  # a tile's width is a tuple's length, part of its type


@inline
def padded_head(head_dim):
    return (head_dim + 15) // 16 * 16


@inline
def sub_block_bytes(head_dim, number_bytes):
    """Bytes of the keys and values of 16 tokens of one head."""
    return 2 * SUB_BLOCK * padded_head(head_dim) * number_bytes


# ---- tiles: one register for each of several queries ----


def _element(context: Any, b: Any, kind: Any, array: Any, index: Any) -> Any:
    return b.gep(context.make_array(kind)(context, b, array).data, [index])


@intrinsic  # type: ignore[untyped-decorator]
def zero_tile(typingctx: Any, width: Any) -> Any:
    """As many zero registers as ``width``, a tuple, is long."""
    sig = types.UniTuple(f32x16, width.count)(width)
    return sig, lambda c, b, s, a: c.make_tuple(b, s.return_type, [constant(f32x16.llvm, 0.0)] * s.return_type.count)


@intrinsic  # type: ignore[untyped-decorator]
def load_tile(typingctx: Any, width: Any, array: Any, index: Any, stride: Any) -> Any:
    """Register i from array[index + i * stride:]."""
    sig = types.UniTuple(f32x16, width.count)(width, array, types.intp, types.intp)

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        registers, at = [], values[2]
        for _ in range(sig.return_type.count):
            pointer = pointer_to(b, _element(context, b, sig.args[1], values[1], at), f32x16.llvm)
            registers.append(b.load(pointer, align=4))
            at = b.add(at, values[3])
        return context.make_tuple(b, sig.return_type, registers)

    return sig, lower


@intrinsic  # type: ignore[untyped-decorator]
def store_tile(typingctx: Any, array: Any, index: Any, stride: Any, tile: Any) -> Any:
    """array[index + i * stride:] = register i"""
    sig = types.void(array, types.intp, types.intp, tile)

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        at = values[1]
        for register in cgutils.unpack_tuple(b, values[3]):
            pointer = pointer_to(b, _element(context, b, sig.args[0], values[0], at), f32x16.llvm)
            b.store(register, pointer, align=4)
            at = b.add(at, values[2])
        return context.get_dummy_value()

    return sig, lower


def _scalars(context: Any, b: Any, sig: Any, values: Any, first: int, count: int) -> list[Any]:
    """array[index + i * stride] in every lane, for arguments (array, index, stride) from ``first`` on."""
    found, at = [], values[first + 1]
    for _ in range(count):
        element = b.load(pointer_to(b, _element(context, b, sig.args[first], values[first], at), F32), align=4)
        found.append(broadcast(b, element))
        at = b.add(at, values[first + 2])
    return found


@intrinsic  # type: ignore[untyped-decorator]
def fma_tile(typingctx: Any, tile: Any, vector: Any, array: Any, index: Any, stride: Any) -> Any:
    """Register i plus vector * array[index + i * stride]."""
    sig = tile(tile, vector, array, types.intp, types.intp)

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        scalars = _scalars(context, b, sig, values, 2, sig.return_type.count)
        registers = cgutils.unpack_tuple(b, values[0])
        summed = [emit_fma(b, values[1], scalar, register) for scalar, register in zip(scalars, registers, strict=True)]
        return context.make_tuple(b, sig.return_type, summed)

    return sig, lower


@intrinsic  # type: ignore[untyped-decorator]
def scale_tile(typingctx: Any, tile: Any, array: Any, index: Any) -> Any:
    """Register i times array[index + i]."""
    sig = tile(tile, array, types.intp)

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        one = context.get_constant(types.intp, 1)
        scalars = _scalars(context, b, sig, [*values, one], 1, sig.return_type.count)
        registers = cgutils.unpack_tuple(b, values[0])
        scaled = [b.fmul(register, scalar) for scalar, register in zip(scalars, registers, strict=True)]
        return context.make_tuple(b, sig.return_type, scaled)

    return sig, lower


# ---- the cache ----

HALF, SINGLE = (0,) * 2, (0,) * 4  # a number's bytes as a tuple's length, so that each has code of its own


@inline
def _load_number(number, kv, at):
    return load_f16(kv, at) if len(number) == 2 else load_f32(kv, at)


@intrinsic  # type: ignore[untyped-decorator]
def _scatter(typingctx: Any, number: Any, kv: Any, at: Any, vector: Any) -> Any:
    """Lane i to the number at byte ``at`` of column i, columns being 16 numbers apart."""
    sig = types.void(number, kv, types.intp, vector)

    def lower(context: Any, b: Any, sig: Any, values: Any) -> Any:
        size = sig.args[0].count
        numbers = emit_f32_to_f16(b, values[3]) if size == 2 else values[3]
        for i in range(LANES):
            at = b.add(values[2], context.get_constant(types.intp, LANES * size * i))
            element = b.extract_element(numbers, context.get_constant(types.int32, i))
            b.store(element, pointer_to(b, _element(context, b, sig.args[1], values[1], at), element.type), align=size)
        return context.get_dummy_value()

    return sig, lower


@jit
def _write_kv(number, kv, sub_block, offset, head_dim, k, k_at, v, v_at):
    size, width = len(number), padded_head(head_dim)
    limit = splat(MAX_F16)
    for d in range(0, head_dim, LANES):
        count = np.int32(min(LANES, head_dim - d))
        key, value = load_f32_first(k, k_at + d, count), load_f32_first(v, v_at + d, count)
        _scatter(number, kv, sub_block + (d * LANES + offset) * size, maximum(minimum(key, limit), splat(-MAX_F16)))
        at = sub_block + ((LANES + offset) * width + d) * size
        value = maximum(minimum(value, limit), splat(-MAX_F16))
        if size == 2:
            store_f16(kv, at, value)
        else:
            store_f32(kv, at, value)


@jit
def write_kv(is_f16, kv, sub_block, offset, head_dim, k, k_at, v, v_at):
    """Keeps one head's key k[k_at:] and value v[v_at:] of a token at ``offset`` 0..15 of the sub-block at that byte.

    What an f16 cannot hold becomes its largest (with f32 too): an infinity would spoil sums it has no weight in.
    """
    if is_f16:
        _write_kv(HALF, kv, sub_block, offset, head_dim, k, k_at, v, v_at)
    else:
        _write_kv(SINGLE, kv, sub_block, offset, head_dim, k, k_at, v, v_at)


@inline
def sub_block_at(table, row, position, block_size, block_bytes, sub_bytes):
    """Byte, within one layer and head, of the sub-block that holds ``position`` of the request in ``row``."""
    block = np.int64(table[row, position // block_size])
    return block * block_bytes + position % block_size // SUB_BLOCK * sub_bytes


# ---- attention ----


@inline
def scratch_floats(head_dim):
    """Floats of scratch that attend needs."""
    return TILE * (head_dim + CHUNK + padded_head(head_dim) + SUB_BLOCK) + 3 * LANES


@jit
def _pack_queries(width, q, q_at, q_row, head_dim, scale, group, first, count, packed):
    """packed[d * W + i] = dimension d of query first + i, scaled; zero past ``count``."""
    for i in range(len(width)):
        at = q_at + (first + i) // group * q_row + (first + i) % group * head_dim
        for d in range(head_dim):
            packed[d * len(width) + i] = q[at + d] * scale if i < count else np.float32(0.0)


@jit
def _score(number, width, packed, kv, at, head_dim, scores, column):
    """scores[i * CHUNK + column : + 16] = query i times the keys of the sub-block at byte ``at``."""
    tile = zero_tile(width)
    for d in range(head_dim):
        key = _load_number(number, kv, at + d * LANES * len(number))
        tile = fma_tile(tile, key, packed, d * len(width), 1)
    store_tile(scores, column, CHUNK, tile)


@jit
def _soften(width, scores, num_subs, largest, decay, sums):
    """Scores to weights, under a new largest; ``decay`` is what earlier sums are to be scaled by."""
    for i in range(len(width)):
        top = load_f32(scores, i * CHUNK)
        for j in range(1, num_subs):
            top = maximum(load_f32(scores, i * CHUNK + j * LANES), top)
        decay[i] = max(largest[i], max_lanes(top))
    new = load_f32(decay, 0)
    store_f32(decay, 0, exp16(load_f32(largest, 0) - new))
    store_f32(largest, 0, new)
    for i in range(len(width)):
        total = load_f32(sums, i * LANES) * splat(decay[i])
        for j in range(num_subs):
            weight = exp16(load_f32(scores, i * CHUNK + j * LANES) - splat(largest[i]))
            store_f32(scores, i * CHUNK + j * LANES, weight)
            total = total + weight
        store_f32(sums, i * LANES, total)


@jit
def _add_values(number, width, kv, at, head_dim, num_keys, scores, column, summed):
    """Adds the weighted values of the first ``num_keys`` tokens of the sub-block at byte ``at``."""
    row = padded_head(head_dim)
    for d in range(0, row, LANES):
        tile = load_tile(width, summed, d * len(width), LANES)
        first = at + (LANES * row + d) * len(number)
        for key in range(num_keys):
            value = _load_number(number, kv, first + key * row * len(number))
            tile = fma_tile(tile, value, scores, column + key, CHUNK)
        store_tile(summed, d * len(width), LANES, tile)


@jit
def _decay_values(width, head_dim, decay, summed):
    for d in range(0, padded_head(head_dim), LANES):
        tile = load_tile(width, summed, d * len(width), LANES)
        store_tile(summed, d * len(width), LANES, scale_tile(tile, decay, 0))


@jit
def _attend_tile(
    number, width, q, q_at, q_row, group, head_dim, scale, first, count, position,
    kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
):  # fmt: skip
    """attend for queries first .. first + count, count <= W; query i is token i // group, head i % group."""
    w, size = len(width), sub_block_bytes(head_dim, len(number))
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
            at = base + sub_block_at(table, row, start + j * LANES, block_size, block_bytes, size)
            _score(number, width, packed, kv, at, head_dim, scores, j * LANES)
        if start + CHUNK > last:
            for i in range(count):
                visible = (position + (first + i) // group) % LANES + 1
                scores[i * CHUNK + (num_subs - 1) * LANES + visible : i * CHUNK + num_subs * LANES] = NEVER
        _soften(width, scores, num_subs, largest, decay, sums)
        _decay_values(width, head_dim, decay, summed)
        for j in range(num_subs):
            at = base + sub_block_at(table, row, start + j * LANES, block_size, block_bytes, size)
            num_keys = min(LANES, last + 1 - start - j * LANES)
            _add_values(number, width, kv, at, head_dim, num_keys, scores, j * LANES, summed)
    for i in range(count):
        share = splat(np.float32(1.0) / sum_lanes(load_f32(sums, i * LANES)))
        at = out_at + (first + i) // group * out_row + (first + i) % group * head_dim
        for d in range(0, head_dim, LANES):
            # Adding 0 makes a sum's -0 a 0: which of them it is could depend on the tile.
            value = load_f32(summed, d * w + i * LANES) * share + splat(np.float32(0.0))
            store_f32_first(out, at + d, value, np.int32(min(LANES, head_dim - d)))


@jit
def _attend(
    number, q, q_at, q_row, num_tokens, group, head_dim, scale, position,
    kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
):  # fmt: skip
    first, n = 0, num_tokens * group
    while first < n:
        count = min(TILE, n - first)
        if count > 8:
            _attend_tile(
                number, W16, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
            )  # fmt: skip
        elif count > 4:
            _attend_tile(
                number, W8, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
            )  # fmt: skip
        elif count > 1:
            _attend_tile(
                number, W4, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
            )  # fmt: skip
        else:
            _attend_tile(
                number, W1, q, q_at, q_row, group, head_dim, scale, first, count, position,
                kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
            )  # fmt: skip
        first += count


@jit
def attend(
    is_f16, q, q_at, q_row, num_tokens, group, head_dim, scale, position,
    kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
):  # fmt: skip
    """Attention of ``group`` query heads over one head of keys, for tokens of one request in one sub-block.

    q [num_tokens, group, head_dim] starts at q_at and out at out_at, rows of tokens q_row and out_row apart. Token t
    stands at ``position + t`` and sees 0..position + t of the request whose blocks are table[row]; ``base`` is the
    byte of this layer and head in block 0. All tokens lie in one aligned run of 16 positions.
    """
    if is_f16:
        _attend(
            HALF, q, q_at, q_row, num_tokens, group, head_dim, scale, position,
            kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
        )  # fmt: skip
    else:
        _attend(
            SINGLE, q, q_at, q_row, num_tokens, group, head_dim, scale, position,
            kv, base, table, row, block_size, block_bytes, out, out_at, out_row, scratch,
        )  # fmt: skip

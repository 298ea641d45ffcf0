"""Operations on a tile: 16 rows of weights times a few columns of activations.

A column is one f32x16 (16 rows) in a tuple, so the number of columns is part of the type and one kernel source serves
every width. What is done to a column never depends on the others, so neither do its bits.

Activations of quantised weights are records of RECORD bytes, one for each column and group of 32 k:

    0   s8 [32]  values; value * scale is the activation
    32  f32      scale
    36  f32      scale * sum of the values
    40  i32 [3]  ROUND_BITS - offset * sum, for the offsets 8, 16 and 128
    52  i32 [2]  ROUND_BITS - 32 * sum of the first 16 values, and of the last 16

A dot product begins at ROUND_BITS (or at one of the last five) and adds integers smaller than 2**22 to it. Read as a
float it then is ROUND + dot, so one fma gives scale * dot, rounded once: no conversion is needed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tlserve.kernels.emit import (
    COLUMNS,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    POINTER,
    STATIC,
    broadcast,
    call,
    columns_of,
    constant,
    f32x16,
    i32x16,
    instruction,
    pointer_to,
    u8x64,
    vector_of,
)
from tlserve.kernels.jit import TARGET
from tlserve.kernels.layout import BF16, F16, Layout
from tlserve.kernels.simd import ROUND, ROUND_BITS, emit_f16_to_f32, emit_first_lanes, emit_fma

RECORD = 64
SCALE_AT, SUM_AT = 32, 36
START_AT = {8: 40, 16: 44, 128: 48}
HALF_STARTS_AT = (52, 56)
VECTORS = 8  # of 4 k each, in a group


def _at(b: Any, pointer: Any, offset: int) -> Any:
    return b.gep(pointer_to(b, pointer, I8), [ir.Constant(I64, offset)])


def _scalar(b: Any, pointer: Any, offset: int, kind: ir.Type) -> Any:
    """A number of a record in every lane."""
    return broadcast(b, b.load(pointer_to(b, _at(b, pointer, offset), kind), align=4))


def _columns(tiles: int, width: int) -> types.Type:
    return columns_of(f32x16, tiles * width)


# ---- accumulators: the columns of one tile of rows, or of a few tiles, one after the other ----


@instruction(_columns, STATIC, STATIC)
def zero_columns(b: Any, tiles: int, width: int) -> list[Any]:
    return [constant(f32x16.llvm, 0.0)] * (tiles * width)


def _first_rows(b: Any, count: Any, tile: int) -> Any:
    return emit_first_lanes(b, b.sub(count, ir.Constant(I32, LANES * tile)))


def _masked_load(b: Any, pointer: Any, mask: Any) -> Any:
    where, zeros = pointer_to(b, pointer, f32x16.llvm), constant(f32x16.llvm, 0.0)
    return call(b, "llvm.masked.load.v16f32.p0", f32x16.llvm, where, ir.Constant(I32, 4), mask, zeros)


def _element(b: Any, pointer: Any, step: Any, column: int, tile: int) -> Any:
    """Where a column of a tile begins in an array of floats, whose columns are ``step`` bytes apart."""
    offset = b.add(b.mul(step, ir.Constant(I64, column)), ir.Constant(I64, 4 * LANES * tile))
    return b.gep(pointer_to(b, pointer, I8), [offset])


@instruction(_columns, STATIC, STATIC, POINTER, types.int32)
def repeat_rows(b: Any, tiles: int, width: int, pointer: Any, count: Any) -> list[Any]:
    """Every column the same ``count`` floats, zeros past them."""
    columns = []
    for t in range(tiles):
        where = _at(b, pointer, 4 * LANES * t)
        columns += [_masked_load(b, where, _first_rows(b, count, t))] * width
    return columns


@instruction(_columns, STATIC, STATIC, POINTER, types.intp, types.int32)
def load_columns(b: Any, tiles: int, width: int, pointer: Any, step: Any, count: Any) -> list[Any]:
    """``count`` floats as column c, zeros past them; columns are ``step`` bytes apart, rows of a tile adjacent."""
    columns = []
    for t in range(tiles):
        mask = _first_rows(b, count, t)
        columns += [_masked_load(b, _element(b, pointer, step, c, t), mask) for c in range(width)]
    return columns


@instruction(types.void, STATIC, STATIC, COLUMNS, POINTER, types.intp, types.int32)
def store_columns(b: Any, tiles: int, width: int, columns: list[Any], pointer: Any, step: Any, count: Any) -> None:
    """The inverse of ``load_columns``: past ``count`` nothing is written."""
    for t in range(tiles):
        mask = _first_rows(b, count, t)
        for c, column in enumerate(columns[t * width : (t + 1) * width]):
            where = pointer_to(b, _element(b, pointer, step, c, t), f32x16.llvm)
            call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), column, where, ir.Constant(I32, 4), mask)


@instruction(lambda columns, others: columns, COLUMNS, COLUMNS)
def add_columns(b: Any, columns: list[Any], others: list[Any]) -> list[Any]:
    return [b.fadd(column, other) for column, other in zip(columns, others, strict=True)]


# ---- weights of a group ----


@instruction(lambda layout: columns_of(u8x64, VECTORS), STATIC, POINTER)
def load_values(b: Any, layout: Layout, pointer: Any) -> list[Any]:
    """The q of 16 rows as bytes: register v holds k = 4 v + i in byte 4 r + i."""

    def load(index: int) -> Any:
        return b.load(pointer_to(b, _at(b, pointer, 64 * index), u8x64.llvm), align=1)

    def shifted(vector: Any, left: int, mask: int) -> Any:
        """(vector << left) & mask, or to the right where left is negative; the mask drops bits of neighbours."""
        pairs = b.bitcast(vector, vector_of(I16, 32))
        count = constant(pairs.type, abs(left))
        moved = pairs if left == 0 else b.shl(pairs, count) if left > 0 else b.lshr(pairs, count)
        return b.and_(b.bitcast(moved, u8x64.llvm), constant(u8x64.llvm, mask))

    if layout.bits == 8:
        return [load(v) for v in range(VECTORS)]
    nibbles = [load(j) for j in range(VECTORS // 2)]
    values = [shifted(nibbles[v // 2], -4 * (v % 2), 15) for v in range(VECTORS)]
    if layout.bits == 5:
        fifths = load(4)
        return [b.or_(value, shifted(fifths, 4 - v, 16)) for v, value in enumerate(values)]
    if layout.bits == 6:
        pairs = [load(4), load(5)]
        return [b.or_(value, shifted(pairs[v // 4], 4 - 2 * (v % 4), 48)) for v, value in enumerate(values)]
    return values


def _f16(b: Any, pointer: Any, offset: int) -> Any:
    return emit_f16_to_f32(b, b.load(pointer_to(b, _at(b, pointer, offset), vector_of(I16)), align=2))


def _small(b: Any, pointer: Any, offset: int, *, signed: bool) -> Any:
    stored = b.load(pointer_to(b, _at(b, pointer, offset), vector_of(I8)), align=1)
    return b.sitofp(b.sext(stored, i32x16.llvm) if signed else b.zext(stored, i32x16.llvm), f32x16.llvm)


def _scales(b: Any, layout: Layout, header: Any, pointer: Any, second: int) -> Any:
    """The first or second run of scales or minimums of a group; the products of K formats are exact."""
    offset = layout.values_bytes + second * layout.scale_bytes
    if not layout.is_k:
        return _f16(b, pointer, offset)
    super_scale = _f16(b, header, 0 if layout.halves else 32 * second)
    return b.fmul(super_scale, _small(b, pointer, offset, signed=bool(layout.halves)))


@instruction(f32x16, STATIC, POINTER, POINTER)
def load_scale(b: Any, layout: Layout, header: Any, group: Any) -> Any:
    """Scales of a group, with halves those of its first 16 k; header is where its block begins."""
    return _scales(b, layout, header, group, 0)


@instruction(f32x16, STATIC, POINTER, POINTER)
def load_second(b: Any, layout: Layout, header: Any, group: Any) -> Any:
    """With halves the scales of the last 16 k, of affine layouts what is added to every value, else zeros."""
    if layout.halves:
        return _scales(b, layout, header, group, 1)
    if layout.offset:
        return constant(f32x16.llvm, 0.0)
    minimum = _scales(b, layout, header, group, 1)
    return b.fneg(minimum) if layout.is_k else minimum


# ---- dot products: the same integers on every ISA ----


def _halves(b: Any, vector: Any) -> list[Any]:
    count = vector.type.count // 2
    starts = ([i + start for i in range(count)] for start in (0, count))
    undefined = ir.Constant(vector.type, ir.Undefined)
    return [b.shuffle_vector(vector, undefined, ir.Constant(vector_of(I32, count), lanes)) for lanes in starts]


def _dot(b: Any, total: Any, weights: Any, four: Any) -> Any:
    """total + the sum of four products of unsigned bytes of weights and the signed bytes of ``four``, in each lane."""
    if TARGET.isa == "avx512":
        operands = (total, b.bitcast(weights, i32x16.llvm), broadcast(b, four))
        return call(b, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, *operands)
    if TARGET.isa == "avx2":
        dot = _dot_vnni256 if _HAS_VNNI256 else _dot_avx2
        wide = b.bitcast(broadcast(b, four), u8x64.llvm)
        parts = [dot(b, *operands) for operands in zip(*(_halves(b, v) for v in (total, weights, wide)), strict=True)]
        return b.shuffle_vector(*parts, ir.Constant(vector_of(I32), list(range(LANES))))
    return _dot_plain(b, total, weights, four)


_HAS_VNNI256 = "avxvnni" in TARGET.features
# Without VNNI products are added in pairs in 16 bits, which hold 2 * 127 * 127 but not 2 * 255 * 127.
_SIGNS_LARGE = TARGET.isa == "avx2" and not _HAS_VNNI256


def _dot_vnni256(b: Any, total: Any, weights: Any, activations: Any) -> Any:
    operands = (b.bitcast(v, total.type) for v in (weights, activations))
    return call(b, "llvm.x86.avx512.vpdpbusd.256", total.type, total, *operands)


def _dot_avx2(b: Any, total: Any, weights: Any, activations: Any) -> Any:
    words = vector_of(I16, LANES)
    pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", words, weights, activations)
    return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", total.type, pairs, constant(words, 1)))


def _dot_signed_avx2(b: Any, total: Any, weights: Any, four: Any) -> Any:
    """The same of weights - 128: magnitudes up to 128 times activations that take their signs, which are above -128."""
    signed = b.xor(weights, constant(u8x64.llvm, 128))
    wide = b.bitcast(broadcast(b, four), u8x64.llvm)
    parts = []
    for half, weight, activation in zip(*(_halves(b, v) for v in (total, signed, wide)), strict=True):
        magnitude = call(b, "llvm.abs.v32i8", weight.type, weight, ir.Constant(I1, 0))
        turned = call(b, "llvm.x86.avx2.psign.b", weight.type, activation, weight)
        parts.append(_dot_avx2(b, half, magnitude, turned))
    return b.shuffle_vector(*parts, ir.Constant(vector_of(I32), list(range(LANES))))


def _dot_plain(b: Any, total: Any, weights: Any, four: Any) -> Any:
    """Products of a byte and a signed byte fit 16 bits, so even and odd bytes are multiplied as 16-bit numbers."""
    pairs = vector_of(I16, 2 * LANES)
    eight, sixteen = constant(pairs, 8), constant(i32x16.llvm, 16)
    activations = b.bitcast(broadcast(b, four), pairs)
    weights = b.bitcast(weights, pairs)
    even = b.mul(b.and_(weights, constant(pairs, 255)), b.ashr(b.shl(activations, eight), eight))
    odd = b.mul(b.lshr(weights, eight), b.ashr(activations, eight))
    for products in (even, odd):
        words = b.bitcast(products, i32x16.llvm)
        total = b.add(total, b.add(b.ashr(b.shl(words, sixteen), sixteen), b.ashr(words, sixteen)))
    return total


def _dots(b: Any, starts: list[Any], values: list[Any], pointer: Any, first: int, dot: Any) -> list[Any]:
    """Adds the products of the vectors of 4 k from number ``first`` of the group on."""
    for v, weights in enumerate(values, first):
        for c, total in enumerate(starts):
            four = b.load(pointer_to(b, _at(b, pointer, c * RECORD + 4 * v), I32), align=4)
            starts[c] = dot(b, total, weights, four)
    return starts


def _group_dots(b: Any, layout: Layout, values: list[Any], width: int, pointer: Any) -> list[Any]:
    """ROUND_BITS + (q - offset) . activations of a group, for each column."""
    if layout.offset == 128 and _SIGNS_LARGE:
        return _dots(b, [constant(i32x16.llvm, ROUND_BITS)] * width, values, pointer, 0, _dot_signed_avx2)
    if layout.offset:
        starts = [_scalar(b, pointer, c * RECORD + START_AT[layout.offset], I32) for c in range(width)]
    else:
        starts = [constant(i32x16.llvm, ROUND_BITS)] * width
    return _dots(b, starts, values, pointer, 0, _dot)


def _half_dots(b: Any, half: int, values: list[Any], width: int, pointer: Any) -> list[Any]:
    """The same of the first or last 16 k, for the offset of 32."""
    starts = [_scalar(b, pointer, c * RECORD + HALF_STARTS_AT[half], I32) for c in range(width)]
    return _dots(b, starts, values[4 * half : 4 * half + 4], pointer, 4 * half, _dot)


def _scaled(b: Any, dot: Any, scale: Any) -> Any:
    """scale * (dot - ROUND_BITS), rounded once."""
    if TARGET.isa == "portable":  # where an fma may be a call for each lane
        return b.fmul(b.sitofp(b.sub(dot, constant(i32x16.llvm, ROUND_BITS)), f32x16.llvm), scale)
    return emit_fma(b, b.bitcast(dot, f32x16.llvm), scale, b.fmul(scale, constant(f32x16.llvm, -ROUND)))


@instruction(lambda layout, columns, values: columns, STATIC, COLUMNS, COLUMNS, f32x16, f32x16, POINTER)
def add_group(
    b: Any, layout: Layout, columns: list[Any], values: list[Any], scale: Any, second: Any, pointer: Any
) -> list[Any]:
    """columns[c] + weights of a group times the activations of the record at index + c * RECORD.

    Integer products are exact; then  columns + (scale * dot) * activation scale, each step rounded once, then for
    affine layouts  + minimum * activation sum. With halves the two scaled dots are added first.
    """
    width = len(columns)
    if layout.halves:
        first, last = (_half_dots(b, half, values, width, pointer) for half in range(2))
        pairs = zip(first, last, strict=True)
        products = [b.fadd(_scaled(b, low, scale), _scaled(b, high, second)) for low, high in pairs]
    else:
        products = [_scaled(b, dot, scale) for dot in _group_dots(b, layout, values, width, pointer)]
    total = []
    for c, product in enumerate(products):
        column = emit_fma(b, product, _scalar(b, pointer, c * RECORD + SCALE_AT, F32), columns[c])
        if not layout.offset:
            column = emit_fma(b, second, _scalar(b, pointer, c * RECORD + SUM_AT, F32), column)
        total.append(column)
    return total


# ---- float weights ----


def _load_floats(b: Any, layout: Layout, pointer: Any) -> Any:
    """16 numbers of a float layout as f32x16."""
    if layout.bits == 32:
        return b.load(pointer_to(b, pointer, f32x16.llvm), align=4)
    halves = b.load(pointer_to(b, pointer, vector_of(I16)), align=2)
    if layout == F16:
        return emit_f16_to_f32(b, halves)
    assert layout == BF16
    return b.bitcast(b.shl(b.zext(halves, i32x16.llvm), constant(i32x16.llvm, 16)), f32x16.llvm)


@instruction(lambda layout, width, columns: columns, STATIC, STATIC, COLUMNS, POINTER, types.intp, POINTER)
def add_product(
    b: Any, layout: Layout, width: int, columns: list[Any], weights: Any, stride: Any, activations: Any
) -> list[Any]:
    """columns[t * width + c] + weights of tile t at one k times the activation of column c at that k.

    Weights are bytes; tile t is ``stride`` bytes after the one before. Activations are floats, side by side.
    """
    total = []
    for t in range(len(columns) // width):
        row = b.gep(pointer_to(b, weights, I8), [b.mul(stride, ir.Constant(I64, t))])
        values = _load_floats(b, layout, row)
        total += [
            emit_fma(b, values, _scalar(b, activations, 4 * c, F32), columns[t * width + c]) for c in range(width)
        ]
    return total

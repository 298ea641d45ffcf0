"""Vector registers as numba types, and operations on them that each become an instruction or two.

A value of f32x16, i32x16, u8x64 or mask16 is one LLVM vector: any ISA runs it, split over as many registers as
it has to be. Kernels are written with the operators and functions below and plain Python loops, and LLVM keeps
the values in registers. All ISAs give the same bits: sums over lanes have one fixed order, fma is always fused, and
rounding is always to nearest, ties to even.

Memory is named by an array of any dtype and an index that counts that dtype's elements; the type that is read
or written is in the function's name. So ``load_f32(x, i)`` reads x[i : i + 16] of a float32 array, and of a uint8
array the 64 bytes from byte i on. No alignment is assumed.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core.typing import templates

from tlserve.kernels.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Vector,
    broadcast,
    call,
    constant,
    f32x16,
    i32x16,
    instruction,
    mask16,
    memory,
    pointer_to,
    vector_of,
)
from tlserve.kernels.jit import TARGET

# ---- operators ----


# numba's own annotations stop half way.
_templates: Any = templates
_extending: Any = extending


def _operators(vector: Vector, result: Vector, table: dict[Any, Callable[[Any, Any, Any], Any]]) -> None:
    for function, emit in table.items():
        cases = [_templates.signature(result, vector, vector)]
        template = type(f"{vector.name}_{function.__name__}", (_templates.ConcreteTemplate,), {"cases": cases})
        _templates.infer_global(function)(template)
        _extending.lower_builtin(function, vector, vector)(lambda context, b, sig, values, emit=emit: emit(b, *values))


def _compare(method: str, relation: str) -> Callable[[Any, Any, Any], Any]:
    return lambda b, x, y: getattr(b, method)(relation, x, y)


_RELATIONS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}

_operators(f32x16, f32x16, {
    operator.add: lambda b, x, y: b.fadd(x, y),
    operator.sub: lambda b, x, y: b.fsub(x, y),
    operator.mul: lambda b, x, y: b.fmul(x, y),
    operator.truediv: lambda b, x, y: b.fdiv(x, y),
})  # fmt: skip
_operators(i32x16, i32x16, {
    operator.add: lambda b, x, y: b.add(x, y),
    operator.sub: lambda b, x, y: b.sub(x, y),
    operator.mul: lambda b, x, y: b.mul(x, y),
    operator.and_: lambda b, x, y: b.and_(x, y),
    operator.or_: lambda b, x, y: b.or_(x, y),
    operator.xor: lambda b, x, y: b.xor(x, y),
    operator.lshift: lambda b, x, y: b.shl(x, y),
    operator.rshift: lambda b, x, y: b.ashr(x, y),
})  # fmt: skip
_operators(mask16, mask16, {
    operator.and_: lambda b, x, y: b.and_(x, y),
    operator.or_: lambda b, x, y: b.or_(x, y),
    operator.xor: lambda b, x, y: b.xor(x, y),
})  # fmt: skip
_operators(f32x16, mask16, {f: _compare("fcmp_unordered" if f is operator.ne else "fcmp_ordered", relation)
                            for f, relation in _RELATIONS.items()})  # fmt: skip
_operators(i32x16, mask16, {f: _compare("icmp_signed", relation) for f, relation in _RELATIONS.items()})


# ---- constants, lanes, conversions ----


@instruction(f32x16, types.float32)
def splat(b: Any, value: Any) -> Any:
    """Sixteen times the same float."""
    return broadcast(b, value)


@instruction(i32x16, types.int32)
def splat_i32(b: Any, value: Any) -> Any:
    """Sixteen times the same integer."""
    return broadcast(b, value)


@instruction(types.float32, f32x16, types.int32)
def lane(b: Any, vector: Any, index: Any) -> Any:
    """One lane; index 0..15."""
    return b.extract_element(vector, index)


# Adding 1.5 * 2**23 leaves the rounded integer in the low bits: no ISA needs more than an addition for it.
ROUND = 12582912.0
ROUND_BITS = 0x4B400000


@instruction(i32x16, f32x16)
def round_i32(b: Any, floats: Any) -> Any:
    """To the nearest integer, ties to even; the values must lie within +-2**22."""
    shifted = b.fadd(floats, constant(f32x16.llvm, ROUND))
    return b.sub(b.bitcast(shifted, i32x16.llvm), constant(i32x16.llvm, ROUND_BITS))


@instruction(f32x16, f32x16)
def round_f32(b: Any, floats: Any) -> Any:
    """To the nearest integer as a float, ties to even; the values must lie within +-2**22."""
    return b.fsub(b.fadd(floats, constant(f32x16.llvm, ROUND)), constant(f32x16.llvm, ROUND))


@instruction(f32x16, i32x16)
def from_bits(b: Any, integers: Any) -> Any:
    return b.bitcast(integers, f32x16.llvm)


@instruction(i32x16, f32x16)
def to_bits(b: Any, floats: Any) -> Any:
    return b.bitcast(floats, i32x16.llvm)


# ---- arithmetic ----


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    # Without the instruction LLVM calls C's fmaf for each lane, which gives the same bits.
    return call(b, "llvm.fma.v16f32", f32x16.llvm, x, y, z)


@instruction(f32x16, f32x16, f32x16, f32x16)
def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return emit_fma(b, x, y, z)


@instruction(f32x16, f32x16, f32x16)
def minimum(b: Any, x: Any, y: Any) -> Any:
    """The smaller; y where either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@instruction(f32x16, f32x16, f32x16)
def maximum(b: Any, x: Any, y: Any) -> Any:
    """The larger; y where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@instruction(f32x16, f32x16)
def absolute(b: Any, x: Any) -> Any:
    return call(b, "llvm.fabs.v16f32", f32x16.llvm, x)


@instruction(f32x16, mask16, f32x16, f32x16)
def select(b: Any, mask: Any, x: Any, y: Any) -> Any:
    """x where the mask is set, else y."""
    return b.select(mask, x, y)


def emit_first_lanes(b: Any, count: Any) -> Any:
    return b.icmp_signed("<", ir.Constant(i32x16.llvm, list(range(LANES))), broadcast(b, count))


@instruction(mask16, types.int32)
def first_lanes(b: Any, count: Any) -> Any:
    """A mask of the first ``count`` lanes."""
    return emit_first_lanes(b, count)


@instruction(types.int64, mask16)
def mask_bits(b: Any, mask: Any) -> Any:
    """Lane i as bit i."""
    return b.zext(b.bitcast(mask, I16), I64)


# ---- over the lanes: always lane i with lane i + 8, then + 4, + 2, + 1 ----


def _tree(b: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = vector.type.count
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = (ir.Constant(vector_of(I32, width), list(range(start, start + width))) for start in (0, width))
        vector = combine(b.shuffle_vector(vector, undefined, low), b.shuffle_vector(vector, undefined, high))
    return b.extract_element(vector, ir.Constant(I32, 0))


@instruction(types.float32, f32x16)
def sum_lanes(b: Any, x: Any) -> Any:
    return _tree(b, x, b.fadd)


@instruction(types.float32, f32x16)
def max_lanes(b: Any, x: Any) -> Any:
    """The largest lane; no lane may be NaN."""
    return _tree(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


@instruction(types.int32, i32x16)
def sum_lanes_i32(b: Any, x: Any) -> Any:
    return _tree(b, x, b.add)


# ---- memory ----


@memory(f32x16)
def load_f32(b: Any, pointer: Any) -> Any:
    return b.load(pointer_to(b, pointer, f32x16.llvm), align=4)


@memory(f32x16, types.int32)
def load_f32_first(b: Any, pointer: Any, count: Any) -> Any:
    """The first ``count`` floats, zero in the other lanes; what lies past them is not touched."""
    mask = emit_first_lanes(b, count)
    where = pointer_to(b, pointer, f32x16.llvm)
    zeros = constant(f32x16.llvm, 0.0)
    return call(b, "llvm.masked.load.v16f32.p0", f32x16.llvm, where, ir.Constant(I32, 4), mask, zeros)


@memory(f32x16)
def load_f16(b: Any, pointer: Any) -> Any:
    return emit_f16_to_f32(b, b.load(pointer_to(b, pointer, vector_of(I16)), align=2))


@memory(i32x16)
def load_i32(b: Any, pointer: Any) -> Any:
    return b.load(pointer_to(b, pointer, i32x16.llvm), align=4)


@memory(types.void, f32x16)
def store_f32(b: Any, pointer: Any, value: Any) -> None:
    b.store(value, pointer_to(b, pointer, f32x16.llvm), align=4)


@memory(types.void, f32x16, types.int32)
def store_f32_first(b: Any, pointer: Any, value: Any, count: Any) -> None:
    """Writes the first ``count`` lanes only."""
    mask = emit_first_lanes(b, count)
    where = pointer_to(b, pointer, f32x16.llvm)
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), value, where, ir.Constant(I32, 4), mask)


@memory(types.void, f32x16)
def store_f16(b: Any, pointer: Any, value: Any) -> None:
    b.store(emit_f32_to_f16(b, value), pointer_to(b, pointer, vector_of(I16)), align=2)


@memory(types.void, i32x16)
def store_i32(b: Any, pointer: Any, value: Any) -> None:
    b.store(value, pointer_to(b, pointer, i32x16.llvm), align=4)


@memory(types.void, i32x16)
def store_i8(b: Any, pointer: Any, value: Any) -> None:
    """The low byte of each lane."""
    b.store(b.trunc(value, vector_of(I8)), pointer_to(b, pointer, vector_of(I8)), align=1)


def emit_scatter(b: Any, pointer: Any, vector: Any, stride: int) -> None:
    """Lane i to the number that is ``i * stride`` numbers after the pointer."""
    first = pointer_to(b, pointer, vector.type.element)
    size = 4 if vector.type.element == F32 else 2
    for i in range(LANES):
        element = b.extract_element(vector, ir.Constant(I32, i))
        b.store(element, b.gep(first, [ir.Constant(I64, i * stride)]), align=size)


@memory(types.float32)
def scalar_f32(b: Any, pointer: Any) -> Any:
    """One float."""
    return b.load(pointer_to(b, pointer, F32), align=4)


@memory(types.int32)
def scalar_i32(b: Any, pointer: Any) -> Any:
    """One 32-bit integer."""
    return b.load(pointer_to(b, pointer, I32), align=4)


@memory(types.float32)
def scalar_f16(b: Any, pointer: Any) -> Any:
    """One half as a float."""
    half = b.load(pointer_to(b, pointer, I16), align=2)
    return b.extract_element(emit_f16_to_f32(b, broadcast(b, half)), ir.Constant(I32, 0))


@memory(types.void)
def prefetch(b: Any, pointer: Any) -> None:
    """Asks for the cache line, into the second-level cache; any address is allowed.

    Into the first level a line would take up one of the few buffers for its misses until memory has answered.
    """
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer_to(b, pointer, I8), *(ir.Constant(I32, n) for n in (0, 2, 1)))


# ---- f16, where the CPU cannot convert ----

_HAS_F16 = "f16c" in TARGET.features or platform.machine() not in ("x86_64", "AMD64")


def emit_f16_to_f32(b: Any, halves: Any) -> Any:
    """<16 x i16> -> <16 x float>, exactly."""
    if _HAS_F16:
        return b.fpext(b.bitcast(halves, vector_of(F16)), f32x16.llvm)
    wide = i32x16.llvm
    half = b.zext(halves, wide)
    magnitude = b.shl(b.and_(half, constant(wide, 0x7FFF)), constant(wide, 13))
    normal = b.add(magnitude, constant(wide, (127 - 15) << 23))
    # Infinity and NaN have the largest exponent in both; a subnormal is a multiple of 2**-24.
    special = b.icmp_unsigned(">=", magnitude, constant(wide, 0x7C00 << 13))
    normal = b.select(special, b.add(normal, constant(wide, (128 - 16) << 23)), normal)
    lifted = b.bitcast(b.add(magnitude, constant(wide, (127 - 14) << 23)), f32x16.llvm)
    subnormal = b.bitcast(b.fsub(lifted, constant(f32x16.llvm, 2.0**-14)), wide)
    value = b.select(b.icmp_unsigned("<", magnitude, constant(wide, 0x400 << 13)), subnormal, normal)
    sign = b.shl(b.and_(half, constant(wide, 0x8000)), constant(wide, 16))
    return b.bitcast(b.or_(value, sign), f32x16.llvm)


def emit_f32_to_f16(b: Any, floats: Any) -> Any:
    """<16 x float> -> <16 x i16>, to nearest, ties to even."""
    if _HAS_F16:
        return b.bitcast(b.fptrunc(floats, vector_of(F16)), vector_of(I16))
    wide = i32x16.llvm
    whole = b.bitcast(floats, wide)
    magnitude = b.and_(whole, constant(wide, 0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    rounded = b.add(b.add(magnitude, constant(wide, ((15 - 127) << 23) + 0xFFF)), odd)
    normal = b.lshr(rounded, constant(wide, 13))
    # Adding 0.5 puts the last bit of a subnormal half into the last bit of the sum.
    lifted = b.fadd(b.bitcast(magnitude, f32x16.llvm), constant(f32x16.llvm, 0.5))
    subnormal = b.sub(b.bitcast(lifted, wide), constant(wide, 126 << 23))
    value = b.select(b.icmp_unsigned("<", magnitude, constant(wide, (127 - 14) << 23)), subnormal, normal)
    value = b.select(b.icmp_unsigned(">=", magnitude, constant(wide, (127 + 16) << 23)), constant(wide, 0x7C00), value)
    value = b.select(b.icmp_unsigned(">", magnitude, constant(wide, 0x7F800000)), constant(wide, 0x7E00), value)
    sign = b.lshr(b.and_(whole, constant(wide, 0x80000000)), constant(wide, 16))
    return b.trunc(b.or_(value, sign), vector_of(I16))

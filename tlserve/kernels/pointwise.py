"""What happens to one row of activations between two matrix products: norm, rope, silu, exp.

Every function works on a stretch of a flat float32 array, named by the index of its first number. A row's bits
depend on the row alone: sums run over 16 lanes in order, then over the lanes in the fixed order of sum_lanes.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator, arg-type"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlserve.kernels.jit import inline, jit
from tlserve.kernels.simd import (
    fma,
    from_bits,
    load_f32,
    load_f32_first,
    maximum,
    minimum,
    round_f32,
    round_i32,
    select,
    splat,
    splat_i32,
    store_f32,
    store_f32_first,
    sum_lanes,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LOG2E = np.float32(1.44269504)
# ln 2 in two parts; the high one has 15 bits, so that its product with an exponent is exact.
LN2_HIGH = np.float32(0.693145751953125)
LN2_LOW = np.float32(1.42860677e-06)
LOWEST = np.float32(-87.33654)  # exp of less is no normal number, and counts as 0
HIGHEST = np.float32(88.37626)  # exp of more counts as exp of this, 2.4e38
EXPONENT_BITS = np.int32(23)
BIAS = np.int32(127)
# exp(r) = 1 + r + r**2 * polynomial(r) on |r| <= ln(2) / 2, fitted for the least largest error: 0.001 ulp.
C2, C3, C4, C5, C6, C7 = (
    np.float32(c)
    for c in (0.5000000078117482, 0.16666666860041887, 0.041666269243694945, 0.008333264489762295,
              0.0013946122572456316, 0.00019918318551626462)
)  # fmt: skip


@inline
def exp16(x: Any) -> Any:
    """exp of 16 floats, within 1 ulp; 0 under LOWEST (so of -inf), and never infinite."""
    bounded = minimum(maximum(x, splat(LOWEST)), splat(HIGHEST))
    scaled = bounded * splat(LOG2E)
    n = round_f32(scaled)
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), bounded))
    p = fma(splat(C7), r, splat(C6))
    p = fma(p, r, splat(C5))
    p = fma(p, r, splat(C4))
    p = fma(p, r, splat(C3))
    p = fma(p, r, splat(C2))
    p = fma(p, r * r, r) + splat(np.float32(1.0))
    power = from_bits((round_i32(scaled) + splat_i32(BIAS)) << splat_i32(EXPONENT_BITS))
    return select(x < splat(LOWEST), splat(np.float32(0.0)), p * power)


@jit
def sum_of_squares(x: Floats, start: int, size: int) -> float:
    """Sum of x[start : start + size] squared."""
    total = splat(np.float32(0.0))
    whole = size - size % 16
    for i in range(start, start + whole, 16):
        v = load_f32(x, i)
        total = fma(v, v, total)
    if whole < size:
        v = load_f32_first(x, start + whole, np.int32(size - whole))
        total = fma(v, v, total)
    return sum_lanes(total)


@jit
def rms_norm(
    x: Floats, start: int, size: int, weight: Bytes, weight_at: int, eps: float, out: Floats, out_at: int
) -> None:
    """out = x / sqrt(mean(x**2) + eps) * weight; the weights are f32 at byte ``weight_at``. ``out`` may be ``x``."""
    mean = sum_of_squares(x, start, size) / np.float32(size)
    scale = splat(np.float32(1.0) / np.float32(np.sqrt(mean + eps)))
    whole = size - size % 16
    for i in range(0, whole, 16):
        store_f32(out, out_at + i, load_f32(x, start + i) * scale * load_f32(weight, weight_at + 4 * i))
    if whole < size:
        rest = np.int32(size - whole)
        v = load_f32_first(x, start + whole, rest) * scale
        store_f32_first(out, out_at + whole, v * load_f32_first(weight, weight_at + 4 * whole, rest), rest)


@jit
def rope(x: Floats, start: int, half: int, cosines: Floats, sines: Floats, angle_at: int) -> None:
    """Rotates the pairs (x[i], x[i + half]) for i under ``half``; cosines and sines from index ``angle_at`` on."""
    whole = half - half % 16
    for i in range(0, whole, 16):
        c, s = load_f32(cosines, angle_at + i), load_f32(sines, angle_at + i)
        a, b = load_f32(x, start + i), load_f32(x, start + half + i)
        store_f32(x, start + i, a * c - b * s)
        store_f32(x, start + half + i, b * c + a * s)
    for i in range(whole, half):
        c1, s1 = cosines[angle_at + i], sines[angle_at + i]
        a1, b1 = x[start + i], x[start + half + i]
        x[start + i] = a1 * c1 - b1 * s1
        x[start + half + i] = b1 * c1 + a1 * s1


@inline
def _silu16(x: Any) -> Any:
    one = splat(np.float32(1.0))
    return x / (one + exp16(splat(np.float32(0.0)) - x))


@jit
def silu_times(gate: Floats, gate_at: int, up: Floats, up_at: int, size: int, out: Floats, out_at: int) -> None:
    """out = gate / (1 + exp(-gate)) * up"""
    whole = size - size % 16
    for i in range(0, whole, 16):
        store_f32(out, out_at + i, _silu16(load_f32(gate, gate_at + i)) * load_f32(up, up_at + i))
    if whole < size:
        rest = np.int32(size - whole)
        v = _silu16(load_f32_first(gate, gate_at + whole, rest)) * load_f32_first(up, up_at + whole, rest)
        store_f32_first(out, out_at + whole, v, rest)

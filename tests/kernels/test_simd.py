"""Vector operations against numpy, bit for bit, here and on the other instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tlserve.kernels import jit, simd

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

SPECIAL = [np.inf, -np.inf, 65519, 65520, -65520, 6e-8, 3e-8, 2.9e-8, -6.1e-5, 6.0e-5, 1e-40, -0.0, 0.5, 1.5, 2.5, -2.5]


@jit.jit
def _floats(x: Floats, y: Floats, z: Floats, flat: Floats) -> None:
    """Each 16 numbers of ``flat`` are what one operation gives."""
    a, b, c = simd.load_f32(x, 0), simd.load_f32(y, 0), simd.load_f32(z, 0)
    simd.store_f32(flat, 0, a + b)
    simd.store_f32(flat, 16, a - b)
    simd.store_f32(flat, 32, a * b)
    simd.store_f32(flat, 48, a / b)
    simd.store_f32(flat, 64, simd.fma(a, b, c))
    simd.store_f32(flat, 80, simd.minimum(a, b))
    simd.store_f32(flat, 96, simd.maximum(a, b))
    simd.store_f32(flat, 112, simd.absolute(a))
    simd.store_f32(flat, 128, simd.select(a > b, a, c))
    simd.store_f32(flat, 144, simd.round_f32(a))
    simd.store_f32(flat, 160, simd.load_f32_first(x, 0, 5))
    simd.store_f32_first(flat, 176, a, 5)
    flat[192] = simd.sum_lanes(a)
    flat[193] = simd.max_lanes(a)
    flat[194] = simd.lane(a, 7)


@jit.jit
def _integers(x: Ints, y: Ints, f: Floats, flat: Ints) -> None:
    a, b = simd.load_i32(x, 0), simd.load_i32(y, 0)
    simd.store_i32(flat, 0, a + b)
    simd.store_i32(flat, 16, a - b)
    simd.store_i32(flat, 32, a * b)
    simd.store_i32(flat, 48, a & b)
    simd.store_i32(flat, 64, a | b)
    simd.store_i32(flat, 80, a ^ b)
    simd.store_i32(flat, 96, a << simd.splat_i32(3))
    simd.store_i32(flat, 112, a >> simd.splat_i32(3))
    simd.store_i32(flat, 128, simd.round_i32(simd.load_f32(f, 0)))
    flat[144] = simd.sum_lanes_i32(a)
    flat[145] = simd.mask_bits(a == b)
    flat[146] = simd.mask_bits(simd.first_lanes(3) | (a < b) & (b >= a))


@jit.jit
def _through_halves(x: Floats, halves: NDArray[np.uint16], out: Floats) -> None:
    simd.store_f16(halves, 0, simd.load_f32(x, 0))
    simd.store_f32(out, 0, simd.load_f16(halves, 0))


def _tree_sum(x: Any) -> Any:
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def check_floats() -> None:
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal((3, 16)) * 100).astype(np.float32)
    out = np.zeros((13, 16), np.float32)
    _floats(x, y, z, out.reshape(-1))
    fused = (x.astype(np.float64) * y + z).astype(np.float32)
    five = np.where(np.arange(16) < 5, x, np.float32(0))
    expected = [x + y, x - y, x * y, x / y, fused, np.minimum(x, y), np.maximum(x, y), np.abs(x),
                np.where(x > y, x, z), np.rint(x), five, five]  # fmt: skip
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[row], wanted, err_msg=f"row {row}")
    assert out[12, :3].tolist() == [_tree_sum(x), x.max(), x[7]]


def check_integers() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(-1000, 1000, (2, 16), np.int32)
    y[3] = x[3]
    floats = np.array(SPECIAL[8:] * 2, np.float32)
    out = np.zeros((10, 16), np.int32)
    _integers(x, y, floats, out.reshape(-1))
    expected = [x + y, x - y, x * y, x & y, x | y, x ^ y, x << 3, x >> 3, np.rint(floats)]
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[row], wanted, err_msg=f"row {row}")
    less = int(np.packbits(x < y, bitorder="little").view(np.uint16)[0])
    assert out[9, :3].tolist() == [x.sum(), 8, less | 7]


def check_halves() -> None:
    x = np.array(SPECIAL, np.float32)
    halves, out = np.zeros(16, np.uint16), np.zeros(16, np.float32)
    _through_halves(x, halves, out)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(halves, expected.view(np.uint16))
    np.testing.assert_array_equal(out, expected.astype(np.float32))


CHECKS = [check_floats, check_integers, check_halves]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_operations_give_what_numpy_gives(check: Any) -> None:
    check()


@pytest.mark.parametrize("isa", jit.ISAS[jit.ISAS.index(jit.TARGET.isa) + 1 :])
def test_operations_give_the_same_on_every_instruction_set(isa: str) -> None:
    command = [sys.executable, "-c", "from tests.kernels import test_simd as t; [check() for check in t.CHECKS]"]
    subprocess.run(command, env=os.environ | {"TLSERVE_ISA": isa}, check=True)

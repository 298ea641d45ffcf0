"""Norm, rope, silu and exp against float64, over sizes with and without a tail."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.naive import exp_as_kernels
from tlserve.kernels.pointwise import rms_norm, rope, silu_times

Floats = NDArray[np.float32]
SIZES = [2, 15, 16, 17, 64, 100, 576]


def ulps(got: Floats, expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance in units of the last place of the expected value."""
    unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    return np.asarray(np.abs(got.astype(np.float64) - expected) / unit)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def test_exp_is_within_an_ulp_over_its_range() -> None:
    x = np.linspace(-87.3, 88.3, 2_000_003).astype(np.float32)
    assert ulps(exp_as_kernels(x), np.exp(x.astype(np.float64))).max() <= 1.0


def test_exp_of_zero_is_one() -> None:
    """The most likely token weighs exactly 2**40."""
    assert exp_as_kernels(np.zeros(16, np.float32)).tolist() == [1.0] * 16


def test_exp_ends_in_zero_and_never_in_infinity() -> None:
    x = np.array([-np.inf, -1e30, -88.0, 89.0, 1e30, np.inf], np.float32)
    got = exp_as_kernels(x)
    assert got[:3].tolist() == [0, 0, 0]
    assert np.isfinite(got).all()
    assert (got[3:] > 2e38).all()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_the_formula(size: int) -> None:
    x, weight = normal(size + 3), normal(size, seed=1)
    out = np.full(size + 6, 7, np.float32)
    rms_norm(x, 3, size, weight.view(np.uint8), 0, 1e-5, out, 4)
    row = x[3:].astype(np.float64)
    expected = row / np.sqrt((row**2).mean() + 1e-5) * weight
    np.testing.assert_allclose(out[4 : 4 + size], expected, rtol=1e-6)
    assert out[:4].tolist() == [7] * 4
    assert out[4 + size :].tolist() == [7] * 2


def test_rms_norm_of_zeros_is_zero() -> None:
    out = np.ones(20, np.float32)
    rms_norm(np.zeros(20, np.float32), 0, 20, np.ones(20, np.float32).view(np.uint8), 0, 1e-6, out, 0)
    assert not out.any()


@pytest.mark.parametrize("half", [1, 8, 16, 20, 64])
def test_rope_turns_each_pair(half: int) -> None:
    x = normal(2 * half + 1)
    angles = normal(3 * half, seed=2)
    turned = x.copy()
    rope(turned, 1, half, np.cos(angles), np.sin(angles), half)
    pairs = (x[1 : 1 + half] + 1j * x[1 + half :]) * np.exp(1j * angles[half : 2 * half].astype(np.float64))
    np.testing.assert_allclose(turned[1:], np.concatenate([pairs.real, pairs.imag]), rtol=1e-5, atol=1e-6)
    assert turned[0] == x[0]


@pytest.mark.parametrize("size", SIZES)
def test_silu_times_is_the_formula(size: int) -> None:
    gate, up = 10 * normal(size), normal(size, seed=1)
    out = np.full(size + 1, 7, np.float32)
    silu_times(gate, 0, up, 0, size, out, 0)
    expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(out[:size], expected, rtol=1e-6)
    assert out[size] == 7


def test_silu_of_the_largest_inputs_is_finite() -> None:
    gate = np.array([-1e30, -200, 200, 1e30], np.float32)
    out = np.empty(4, np.float32)
    silu_times(gate, 0, np.ones(4, np.float32), 0, 4, out, 0)
    np.testing.assert_allclose(out, [0, 0, 200, 1e30], atol=1e-7)

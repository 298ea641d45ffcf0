"""Products of packed weights: right, and the same bits however they are computed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.products import OFFSET, activations, digest, multiply, packed, random_rows, smallest_k
from tlserve.kernels import jit
from tlserve.kernels.layout import BY_CODE, LAYOUTS, Layout
from tlserve.kernels.unpack import unpack

Floats = NDArray[np.float32]
ROWS = 37  # two tiles and five rows
formats = pytest.mark.parametrize("layout", BY_CODE, ids=lambda layout: layout.name)


def _case(layout: Layout, columns: int, blocks: int = 1) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """Packed weights, the floats they stand for, and activations."""
    rng = np.random.default_rng(layout.code)
    k = blocks * smallest_k(layout)
    arena = packed(layout, random_rows(layout, ROWS, k, rng), k)
    return arena, unpack(layout, arena, OFFSET, ROWS, k), rng.standard_normal((columns, k), np.float32)


def _rounded(x: Floats) -> NDArray[np.float64]:
    """Activations as records hold them: 8-bit numbers with a scale for each 32."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(2, keepdims=True) * np.float32(1 / 127)
    inverse = np.float32(127) / np.abs(groups).max(2, keepdims=True)
    rounded: NDArray[np.float64] = np.rint(groups * inverse).astype(np.float64) * scale
    return rounded.reshape(x.shape)


@formats
@pytest.mark.parametrize("columns", [1, 11])
def test_product_is_that_of_the_unpacked_weights(layout: Layout, columns: int) -> None:
    arena, weights, x = _case(layout, columns, blocks=3)
    seen = _rounded(x) if layout.is_quantised else x.astype(np.float64)
    expected = seen @ weights.T.astype(np.float64)
    np.testing.assert_allclose(multiply(layout, arena, ROWS, x), expected, atol=2e-6 * np.abs(expected).max())


@formats
def test_bits_of_a_column_are_the_same_for_every_number_of_columns(layout: Layout) -> None:
    arena, _, x = _case(layout, 21)
    whole = multiply(layout, arena, ROWS, x)
    for columns in (1, 2, 3, 4, 5, 7, 8, 9, 14):
        part = multiply(layout, arena, ROWS, x[:columns])
        assert part.tobytes() == whole[:columns].tobytes(), columns


@pytest.mark.parametrize("layout", [LAYOUTS["Q4_1"], LAYOUTS["Q6_K"], LAYOUTS["F16"]], ids=lambda layout: layout.name)
def test_long_rows_are_added_in_chunks_with_the_same_bits(layout: Layout) -> None:
    arena, _, x = _case(layout, 9, blocks=1280 // smallest_k(layout))
    assert multiply(layout, arena, ROWS, x)[:1].tobytes() == multiply(layout, arena, ROWS, x[:1]).tobytes()


@formats
def test_bits_do_not_depend_on_how_rows_are_shared_out(layout: Layout) -> None:
    arena, _, x = _case(layout, 9)
    for columns in (1, 9):
        whole = multiply(layout, arena, ROWS, x[:columns])
        assert multiply(layout, arena, ROWS, x[:columns], cuts=(1, 2)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", ["Q4_0", "BF16"])
def test_few_columns_of_a_wider_run_of_lanes(name: str) -> None:
    layout = LAYOUTS[name]
    arena, _, x = _case(layout, 3)
    assert multiply(layout, arena, ROWS, x, lanes=4).tobytes() == multiply(layout, arena, ROWS, x).tobytes()


@pytest.mark.parametrize("name", ["Q4_1", "F32"])
@pytest.mark.parametrize("columns", [2, 6])
def test_sums_begin_with_the_bias_and_with_what_is_there(name: str, columns: int) -> None:
    layout = LAYOUTS[name]
    arena, _, x = _case(layout, columns)
    rng = np.random.default_rng(1)
    bias, there = rng.standard_normal(ROWS, np.float32), rng.standard_normal((columns, ROWS), np.float32)
    with_bias = np.concatenate([arena, bias.view(np.uint8)])
    plain = multiply(layout, arena, ROWS, x)
    biased = multiply(layout, with_bias, ROWS, x, bias=len(arena))
    both = multiply(layout, with_bias, ROWS, x, bias=len(arena), y=there)
    tolerance = 1e-5 * np.abs(plain).max()
    np.testing.assert_allclose(biased, plain + bias, atol=tolerance)
    np.testing.assert_allclose(both, plain + bias + there, atol=tolerance)
    alone = multiply(layout, with_bias, ROWS, x[:1], bias=len(arena), y=there[:1])
    assert alone.tobytes() == both[:1].tobytes()


def test_quantised_groups_are_scaled_by_their_largest_and_rounded_to_nearest() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = [127, -127, 0.5, 1.5]
    records = activations(LAYOUTS["Q4_0"], x, 1).view(np.int8).reshape(-1, 64)
    assert list(records[0, :5]) == [127, -127, 0, 2, 0]
    assert records[0, 32:40].view(np.float32).tolist() == [1.0, 2.0]
    assert not records[1, :40].any()  # nothing but zeros has scale zero


@pytest.mark.parametrize("isa", jit.ISAS[jit.ISAS.index(jit.TARGET.isa) + 1 :])
def test_products_have_the_same_bits_on_every_instruction_set(isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.products"],
        env=os.environ | {"TLSERVE_ISA": isa}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == digest()

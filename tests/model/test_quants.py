"""Dequantisation is the `gguf` package's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from tests.model.containers import write_safetensors
from tests.model.gguf_models import random_blocks
from tlserve.model.quants import dequantise, dequantise_rows
from tlserve.model.safetensors import read_safetensors
from tlserve.model.tensors import Format, Tensor

QUANTISED = [format for format in Format if format.is_quantised]


def oracle(rows: NDArray[np.uint8], format: Format) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(format.value))
    return values


def assert_same_bits(values: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """NaN equals NaN whatever its payload, and 0.0 differs from -0.0."""
    assert values.dtype == np.float32
    assert values.shape == expected.shape
    same = values.view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(values) & np.isnan(expected))).all()


@pytest.mark.parametrize("format", QUANTISED)
def test_a_block_has_the_size_the_format_defines(format: Format) -> None:
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(format.value)]
    assert (format.block_size, format.block_bytes) == sizes


@pytest.mark.parametrize("format", QUANTISED)
def test_usual_values_dequantise_as_the_reference(format: Format) -> None:
    rows = random_blocks(np.random.default_rng(1), format, 5, 768)
    assert_same_bits(dequantise_rows(rows, format), oracle(rows, format))


@pytest.mark.parametrize("format", Format)
@given(data=st.data())
def test_any_bytes_dequantise_as_the_reference(format: Format, data: st.DataObject) -> None:
    """Infinite and NaN scales included, without a warning."""
    bytes_per_row = format.block_bytes * (2 if format.is_quantised else 16)
    rows = data.draw(npst.arrays(np.uint8, (2, bytes_per_row)))
    if format in (Format.F32, Format.F16, Format.BF16):
        float_view = {Format.F32: np.float32, Format.F16: np.float16}.get(format)
        expected = rows.view(float_view).astype(np.float32) if float_view else oracle(rows, format)
    else:
        expected = oracle(rows, format)
    assert_same_bits(dequantise_rows(rows, format), expected)


def test_rows_in_another_order_come_out_in_their_own() -> None:
    stored = random_blocks(np.random.default_rng(2), Format.Q4_1, 4, 64)
    order = np.array([2, 0, 3, 1], dtype=np.intp)
    tensor = Tensor("t", (4, 64), Format.Q4_1, stored, order)
    assert_same_bits(dequantise(tensor), oracle(stored, Format.Q4_1)[order])
    assert np.array_equal(tensor.data, stored[order])


def test_unaligned_bytes_of_a_file_are_read(tmp_path: Path) -> None:
    """A safetensors header may have any length, so float32 data may begin at any byte."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for pad in range(4):
        path = tmp_path / f"{pad}.safetensors"
        write_safetensors(path, {"n" * (pad + 1): values})
        (tensor,) = read_safetensors(path).values()
        assert_same_bits(dequantise(tensor), values)

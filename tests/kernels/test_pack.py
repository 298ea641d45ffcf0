"""Packing loses nothing: what comes back is the reference's dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.kernels.products import OFFSET, packed, random_rows, smallest_k
from tlserve.kernels import pack
from tlserve.kernels.layout import BY_CODE, LAYOUTS, Layout
from tlserve.kernels.unpack import unpack
from tlserve.model.quants import dequantise_rows
from tlserve.model.tensors import Format

formats = pytest.mark.parametrize("layout", BY_CODE, ids=lambda layout: layout.name)


@formats
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 2), (37, 3)])
def test_unpacked_weights_are_those_of_the_file(layout: Layout, rows: int, blocks: int) -> None:
    k = blocks * smallest_k(layout)
    stored = random_rows(layout, rows, k, np.random.default_rng(rows))
    unpacked = unpack(layout, packed(layout, stored, k), OFFSET, rows, k)
    assert unpacked.tobytes() == dequantise_rows(stored, Format[layout.name]).tobytes()


@formats
def test_any_bits_come_back(layout: Layout) -> None:
    """Scales of any magnitude, infinities and NaN included."""
    k = smallest_k(layout)
    stored = np.random.default_rng(0).integers(0, 256, (16, layout.file_row_bytes(k)), np.uint8)
    unpacked = unpack(layout, packed(layout, stored, k), OFFSET, 16, k)
    expected = dequantise_rows(stored, Format[layout.name])
    same = (unpacked.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(unpacked) & np.isnan(expected))
    assert same.all()


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_rows_are_gathered_in_the_order_asked_for(name: str) -> None:
    layout = LAYOUTS[name]
    k = smallest_k(layout)
    stored = random_rows(layout, 20, k, np.random.default_rng(0))
    order = np.random.default_rng(1).permutation(20)[:18]
    arena = pack.allocate(pack.packed_bytes(layout, 18, k))
    pack.pack(layout, stored, k, arena, 0, order=order)
    expected = dequantise_rows(stored[order], Format[name])
    assert unpack(layout, arena, 0, 18, k).tobytes() == expected.tobytes()


def test_rows_of_a_read_only_file_can_be_packed() -> None:
    layout = LAYOUTS["Q8_0"]
    stored = random_rows(layout, 16, 64, np.random.default_rng(0))
    stored.flags.writeable = False
    assert unpack(layout, packed(layout, stored, 64), OFFSET, 16, 64).shape == (16, 64)


@formats
def test_nothing_outside_the_matrix_is_written(layout: Layout) -> None:
    k = smallest_k(layout)
    size = pack.packed_bytes(layout, 17, k)
    arena = pack.allocate(OFFSET + size + 64)
    pack.pack(layout, random_rows(layout, 17, k, np.random.default_rng(0)), k, arena, OFFSET)
    assert not arena[:OFFSET].any()
    assert not arena[OFFSET + size :].any()


@pytest.mark.parametrize(("name", "k", "row_bytes"), [("Q4_0", 48, 27), ("Q4_K", 512, 144), ("F32", 3, 8)])
def test_rows_of_another_length_are_refused(name: str, k: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"{name} row of {k} values cannot have {row_bytes} bytes"):
        pack.pack(LAYOUTS[name], np.zeros((1, row_bytes), np.uint8), k, np.zeros(4096, np.uint8), 0)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_quantised_rows_are_what_other_writers_of_the_format_make(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((9, 96), np.float32)
    values[3] = 0
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert pack.quantise_rows(values, LAYOUTS[name]).tobytes() == expected.tobytes()


def test_arenas_are_zeroed_and_begin_a_huge_page() -> None:
    arena = pack.allocate(100)
    assert arena.shape == (100,)
    assert not arena.any()
    assert arena.ctypes.data % pack.HUGE_PAGE == 0

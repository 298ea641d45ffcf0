"""Invariant: any bytes either parse, with every tensor inside the file, or raise ModelError naming the file."""

from __future__ import annotations

import os
import re
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.containers import (
    gguf_array,
    gguf_bytes,
    gguf_field,
    gguf_info,
    gguf_string,
    gguf_text,
    gguf_u32,
)
from tests.model.gguf_models import random_weights, wide_config, write_gguf_model
from tests.model.smollm2 import SMOLLM2, needs_smollm2
from tests.processor_time import processor_seconds
from tlserve.errors import ModelError
from tlserve.model.gguf import GgufFile, read_gguf
from tlserve.model.tensors import Format

F32, Q4_0 = Format.F32.value, Format.Q4_0.value


def read_bytes(directory: Path, data: bytes) -> GgufFile:
    path = directory / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def small_file() -> bytes:
    """Every kind of value, two tensors of different formats."""
    fields = [
        gguf_text("general.architecture", "llama"),
        gguf_u32("general.alignment", 64),
        gguf_field("flag", 7, b"\1"),
        gguf_field("small", 1, struct.pack("<b", -5)),
        gguf_field("wide", 10, struct.pack("<Q", 1 << 40)),
        gguf_field("real", 12, struct.pack("<d", 0.5)),
        gguf_array("tokens", 8, [gguf_string(text) for text in ("a", "", "é漢")]),
        gguf_array("types", 5, [struct.pack("<i", i) for i in (1, -2, 3)]),
        gguf_array("scores", 6, []),
    ]
    infos = [gguf_info("norm", [3], F32, 0), gguf_info("matrix", [64, 2], Q4_0, 64)]
    data = np.arange(3, dtype=np.float32).tobytes().ljust(64, b"\0") + bytes(range(72))
    return gguf_bytes(fields, infos, data, alignment=64)


def test_fields_and_tensors_are_read(tmp_path: Path) -> None:
    file = read_bytes(tmp_path, small_file())
    scalars = {key: value for key, value in file.fields.items() if not isinstance(value, np.ndarray)}
    assert scalars == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "flag": True,
        "small": -5,
        "wide": 1 << 40,
        "real": 0.5,
        "tokens": ["a", "", "é漢"],
    }
    assert np.array_equal(file.fields["types"], [1, -2, 3])
    assert len(file.fields["scores"]) == 0  # type: ignore[arg-type]
    assert file.tensors["norm"].shape == (3,)
    assert file.tensors["norm"].stored.view(np.float32).tolist() == [[0, 1, 2]]
    assert file.tensors["matrix"].shape == (2, 64)
    assert file.tensors["matrix"].stored.tolist() == [list(range(36)), list(range(36, 72))]


def test_version_2_is_the_same_layout(tmp_path: Path) -> None:
    data = bytearray(small_file())
    data[4] = 2
    assert read_bytes(tmp_path, bytes(data)).fields["wide"] == 1 << 40


@pytest.mark.parametrize("format", [Format.F16, Format.Q5_1, Format.Q6_K])
def test_a_file_of_the_gguf_package_reads_as_that_package_reads_it(tmp_path: Path, format: Format) -> None:
    path = tmp_path / "model.gguf"
    config = wide_config(num_layers=1)
    write_gguf_model(path, config, random_weights(config, 0), format)
    file, oracle = read_gguf(path), gguf.GGUFReader(path)
    for key, field in oracle.fields.items():
        if not key.startswith("GGUF."):
            value = file.fields[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        assert file.tensors[tensor.name].stored.tobytes() == tensor.data.tobytes()


@needs_smollm2
def test_a_vocabulary_of_50_thousand_tokens_opens_quickly() -> None:
    """Measured 0.03 s; the `gguf` package takes 2 s."""
    assert processor_seconds(lambda: read_gguf(SMOLLM2)) < 0.3
    assert len(read_gguf(SMOLLM2).tensors) == 272


HUGE = 1 << 63
HOSTILE = {
    "B119 tensor count": (gguf_bytes(num_tensors=HUGE), "the tensor count"),
    "B119 tensor count that wraps": (gguf_bytes(num_tensors=(1 << 64) - 1), "the tensor count"),
    "B119 field count": (gguf_bytes(num_fields=HUGE), "the field count"),
    "B119 more fields than bytes": (gguf_bytes(num_fields=60000), "the field count"),
    "B119 key length": (gguf_bytes([gguf_string(b"k" * 9, length=1 << 60)]), "the key of field 0"),
    "B119 string length": (gguf_bytes([gguf_field("k", 8, gguf_string(b"v", length=1 << 60))]), "field 'k'"),
    "B119 string length that wraps": (
        gguf_bytes([gguf_field("k", 8, gguf_string(b"v", length=(1 << 64) - 1))]),
        "field 'k'",
    ),
    "B119 numbers in an array": (gguf_bytes([gguf_array("k", 5, [], count=1 << 40)]), "field 'k'"),
    "B119 array size that wraps": (gguf_bytes([gguf_array("k", 12, [], count=1 << 61)]), "field 'k'"),
    "B119 strings in an array": (gguf_bytes([gguf_array("k", 8, [], count=1 << 40)]), "field 'k'"),
    "B119 string in an array": (
        gguf_bytes([gguf_array("k", 8, [gguf_string("ok"), gguf_string(b"v", length=1 << 60)])]),
        "field 'k' string 1",
    ),
    "B119 nested arrays": (
        gguf_bytes([gguf_array("k", 9, [struct.pack("<IQ", 9, 1)] * 1000, count=1)]),
        "field 'k' is an array of arrays",
    ),
    "B119 unknown value type": (
        gguf_bytes([gguf_field("k", 13, bytes(64))]),
        "field 'k' has the unknown value type 13",
    ),
    "B119 unknown element type": (gguf_bytes([gguf_array("k", 77, [bytes(64)])]), "field 'k'.*unknown value type 77"),
    "B119 offset past the end": (gguf_bytes([], [gguf_info("t", [8], F32, 1 << 20)], bytes(32)), "tensor 't' ends at"),
    "B119 offset that wraps": (
        gguf_bytes([], [gguf_info("t", [8], F32, (1 << 64) - 32)], bytes(32)),
        "tensor 't' ends at",
    ),
    "B119 unaligned offset": (gguf_bytes([], [gguf_info("t", [8], F32, 4)], bytes(64)), "tensor 't'.*alignment"),
    "B119 one byte short": (gguf_bytes([], [gguf_info("t", [8], F32, 0)], bytes(31)), "tensor 't' ends at 32, past"),
    "B119 overlap": (
        gguf_bytes([], [gguf_info("a", [16], F32, 0), gguf_info("b", [8], F32, 32)], bytes(64)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "B119 alignment 0": (gguf_bytes([gguf_u32("general.alignment", 0)]), "general.alignment.*got 0"),
    "B119 alignment 3": (gguf_bytes([gguf_u32("general.alignment", 3)]), "general.alignment.*got 3"),
    "B119 alignment 2^31": (gguf_bytes([gguf_u32("general.alignment", 1 << 31)]), "general.alignment"),
    "B119 alignment a string": (gguf_bytes([gguf_text("general.alignment", "32")]), "general.alignment"),
    "B119 unknown tensor type": (gguf_bytes([], [gguf_info("t", [32], 99, 0)], bytes(64)), "tensor 't'.*number 99"),
    "B119 unsupported tensor type": (gguf_bytes([], [gguf_info("t", [256], 10, 0)], bytes(96)), "tensor 't'.*Q2_K"),
    "B118 dimensions 10^6": (
        gguf_bytes([], [gguf_info("t", [8], F32, 0, num_dimensions=10**6)], bytes(64)),
        "tensor 't'.*dimensions, got 1000000",
    ),
    "B118 dimensions 2^32 - 1": (
        gguf_bytes([], [gguf_info("t", [8], F32, 0, num_dimensions=0xFFFFFFFF)], bytes(64)),
        "tensor 't'.*dimensions",
    ),
    "B118 no dimensions": (gguf_bytes([], [gguf_info("t", [], F32, 0)], bytes(64)), "tensor 't'.*dimensions, got 0"),
    "B118 product that wraps": (
        gguf_bytes([], [gguf_info("t", [1 << 32, 1 << 32], F32, 0)], bytes(64)),
        "tensor 't' ends at",
    ),
    "B118 product that wraps to the size": (
        gguf_bytes([], [gguf_info("t", [8, 1 << 63, 2], F32, 0)], bytes(64)),
        "tensor 't' ends at",
    ),
    "B118 dimension 0": (
        gguf_bytes([], [gguf_info("t", [8, 0], F32, 0)], bytes(64)),
        "tensor 't' has a dimension of 0",
    ),
    "B118 empty key": (gguf_bytes([gguf_u32("", 1)]), "the key of field 0 must be 1 to"),
    "B118 empty name": (gguf_bytes([], [gguf_info("", [8], F32, 0)], bytes(64)), "the name of tensor 0"),
    "long name": (gguf_bytes([], [gguf_info("n" * 65, [8], F32, 0)], bytes(64)), "the name of tensor 0.*64"),
    "rows of part of a block": (
        gguf_bytes([], [gguf_info("t", [48, 2], Q4_0, 0)], bytes(64)),
        "tensor 't' has rows of 48, not a multiple of the 32 of Q4_0",
    ),
    "key twice": (gguf_bytes([gguf_u32("k", 1), gguf_u32("k", 2)]), "field 'k' appears twice"),
    "tensor twice": (
        gguf_bytes([], [gguf_info("t", [8], F32, 0), gguf_info("t", [8], F32, 32)], bytes(64)),
        "tensor 't' appears twice",
    ),
    "key that is not UTF-8": (gguf_bytes([gguf_field(b"\xff", 4, bytes(4))]), "the key of field 0 is not UTF-8"),
    "string that is not UTF-8": (gguf_bytes([gguf_field("k", 8, gguf_string(b"\xff"))]), "field 'k' is not UTF-8"),
    "token that is not UTF-8": (
        gguf_bytes([gguf_array("k", 8, [gguf_string("a"), gguf_string(b"\xc3")])]),
        "field 'k' string 1 is not UTF-8",
    ),
    "other magic": (b"GGML" + bytes(64), "the magic is not GGUF"),
    "version 1": (gguf_bytes(version=1), "version 1 is not supported"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "empty file": (b"", "cannot be mapped"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lying_file_is_refused_with_file_and_place(tmp_path: Path, case: str) -> None:
    """B118, B119: within a second, and without memory for what the file only claims to hold."""
    data, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ModelError, match=f"^{re.escape(str(path))}: .*{message}"):
            read_gguf(path)
        assert time.process_time() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "field",
    [
        gguf_field("k", 8, gguf_string(b"", length=1 << 27)),
        gguf_array("k", 8, [gguf_string(b"", length=1 << 27)]),
        gguf_array("k", 8, [], count=(1 << 20) + 1),
        gguf_array("k", 0, [], count=(1 << 20) + 1),
    ],
)
def test_a_table_larger_than_any_real_one_is_refused(tmp_path: Path, field: bytes) -> None:
    """Also where the file is as large as it says: zeros, which take no room on the disk."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes([field]))
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="field 'k'"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_vocabulary_takes_less_than_a_second(tmp_path: Path) -> None:
    half = [gguf_string("")] * (1 << 19)
    data = gguf_bytes([gguf_array("a", 8, half), gguf_array("b", 8, half)])
    assert read_bytes(tmp_path, data).fields["b"] == [""] * (1 << 19)
    assert processor_seconds(lambda: read_bytes(tmp_path, data)) < 1
    data = gguf_bytes([gguf_array("a", 8, half), gguf_array("b", 8, half), gguf_array("c", 8, half[:1])])
    with pytest.raises(ModelError, match="field 'c' has 1 elements; all arrays together may have 1048576"):
        read_bytes(tmp_path, data)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """B119: at every byte of a small file, at each 64th byte of a larger one."""
    whole = small_file()
    for end in range(len(whole)):
        with pytest.raises(ModelError, match=r"model\.gguf"):
            read_bytes(tmp_path, whole[:end])
    config = wide_config(num_layers=1, hidden_size=32, intermediate_size=32, num_heads=1, num_kv_heads=1, head_dim=32)
    write_gguf_model(tmp_path / "whole.gguf", config, random_weights(config, 0), Format.Q8_0)
    whole = (tmp_path / "whole.gguf").read_bytes()
    data_end = len(whole) - len(whole) % 32  # the writer pads the last tensor, and padding may be cut
    for end in range(0, data_end - 32, 64):
        with pytest.raises(ModelError, match=r"model\.gguf"):
            read_bytes(tmp_path, whole[:end])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_gguf(tmp_path)


SMALL = small_file()


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(SMALL) - 1),
            st.one_of(st.binary(min_size=1, max_size=1), st.binary(min_size=8, max_size=8)),
        ),
        min_size=1,
        max_size=4,
    ),
    end=st.integers(0, len(SMALL)),
    cut=st.booleans(),
)
def test_a_mutated_file_parses_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]], end: int, cut: bool
) -> None:
    data = bytearray(SMALL)
    for position, replacement in edits:
        data[position : position + len(replacement)] = replacement
    directory = tmp_path_factory.getbasetemp()
    try:
        tensors = read_bytes(directory, bytes(data[:end] if cut else data)).tensors
    except ModelError:
        return
    for tensor in tensors.values():
        assert tensor.stored.nbytes == np.prod(tensor.shape) // tensor.format.block_size * tensor.format.block_bytes

"""Invariant: any bytes either parse, with the tensors filling the file, or raise ModelError naming the file."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.model.containers import safetensors_bytes, write_safetensors
from tlserve.errors import ModelError
from tlserve.model.safetensors import read_directory, read_safetensors
from tlserve.model.tensors import Format

VALUES: dict[str, NDArray[np.generic]] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "none": np.zeros((0, 5), dtype=np.float32),
    "scalar": np.array(2.5, dtype=np.float32),
}


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_views_with_the_shape_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(VALUES, path, metadata={"format": "pt"})
    tensors = read_safetensors(path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {k: v.shape for k, v in VALUES.items()}
    assert tensors["b"].format is Format.F16
    for name, values in VALUES.items():
        assert tensors[name].stored.tobytes() == values.tobytes()
        assert not tensors[name].stored.flags.owndata
    assert tensors["a"].stored.shape == (2, 12)


def test_a_file_may_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": {"format": "pt"}}))
    assert read_safetensors(path) == {}


HOSTILE = {
    "B116 cut to nothing": (b"", "cannot be mapped"),
    "B116 cut in the length": (b"\x10\0\0", "the header is said to be"),
    "B116 header length 0": (safetensors_bytes(b"", b"12345678", length=0), "the header is not usable JSON"),
    "B116 header length 2^63": (safetensors_bytes({}, length=1 << 63), "the header is said to be 9223372036854775808"),
    "B116 header past the end": (safetensors_bytes({}, length=3), "the header is said to be 3"),
    "B116 header not JSON": (safetensors_bytes(b"{'a': 1}"), "the header is not usable JSON"),
    "B116 header not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "the header is not usable JSON"),
    "B116 header a list": (safetensors_bytes([1, 2]), "the header must be a JSON object"),
    "B116 header nested": (safetensors_bytes(b'{"a":' + b"[" * 100_000), "the header is not usable JSON: nested"),
    "B116 header with endless digits": (safetensors_bytes(b'{"a":' + b"9" * 10_000 + b"}"), "not usable JSON"),
    "B116 key twice": (
        safetensors_bytes(
            b'{"a":' + json.dumps(entry(0, 8)).encode() + b',"a":' + json.dumps(entry(0, 8)).encode() + b"}", bytes(8)
        ),
        "key 'a' appears twice",
    ),
    "B116 last byte cut": (safetensors_bytes({"t": entry(0, 8)}, bytes(7)), "tensor 't' ends at 8, past"),
    "B116 half cut": (safetensors_bytes({"t": entry(0, 8)}, bytes(4)), "tensor 't' ends at 8, past"),
    "B116 trailing byte": (safetensors_bytes({"t": entry(0, 8)}, bytes(9)), "goes on after the last tensor"),
    "B116 offsets swapped": (safetensors_bytes({"t": entry(8, 0)}, bytes(8)), "tensor 't': data_offsets must be"),
    "B116 offsets overlapping": (
        safetensors_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        "tensor 'b' begins at 4 and overlaps",
    ),
    "B116 the same bytes twice": (
        safetensors_bytes({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)),
        "tensor 'b' begins at 0 and overlaps",
    ),
    "B116 a gap": (
        safetensors_bytes({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
        "tensor 'b' begins at 12 and leaves a gap",
    ),
    "B116 a gap at the beginning": (safetensors_bytes({"t": entry(4, 12)}, bytes(12)), "tensor 't' begins at 4"),
    "B116 offsets past the end": (safetensors_bytes({"t": entry(1 << 60, (1 << 60) + 8)}, bytes(8)), "tensor 't' ends"),
    "B116 negative offset": (safetensors_bytes({"t": entry(-8, 0)}, bytes(8)), "tensor 't': data_offsets must be"),
    "B116 offsets of text": (
        safetensors_bytes({"t": {**entry(0, 8), "data_offsets": "08"}}, bytes(8)),
        "tensor 't': data_offsets must be",
    ),
    "B116 three offsets": (
        safetensors_bytes({"t": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, bytes(8)),
        "tensor 't': data_offsets must be",
    ),
    "B116 no offsets": (safetensors_bytes({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)), "tensor 't': data_offsets"),
    "B116 span and shape disagree": (
        safetensors_bytes({"t": entry(0, 8, [3])}, bytes(8)),
        "tensor 't': data_offsets span 8 bytes, its shape and dtype need 12",
    ),
    "B116 shape that wraps to the span": (
        safetensors_bytes({"t": entry(0, 0, [1 << 32, 1 << 32])}),
        "tensor 't': data_offsets span 0",
    ),
    "B116 negative shape": (safetensors_bytes({"t": entry(0, 8, [-2, -1])}, bytes(8)), "tensor 't': shape must be"),
    "B116 shape of booleans": (safetensors_bytes({"t": entry(0, 4, [True])}, bytes(4)), "tensor 't': shape must be"),
    "B116 shape without end": (safetensors_bytes({"t": entry(0, 4, [1] * 99)}, bytes(4)), "tensor 't': shape must be"),
    "B116 bad dtype": (safetensors_bytes({"t": entry(0, 8, dtype="F33")}, bytes(8)), "tensor 't': dtype 'F33'"),
    "B116 unsupported dtype": (safetensors_bytes({"t": entry(0, 2, dtype="F8_E4M3")}, bytes(2)), "dtype 'F8_E4M3'"),
    "B116 dtype a list": (safetensors_bytes({"t": entry(0, 8, dtype=["F32"])}, bytes(8)), "tensor 't': dtype"),
    "B116 entry a number": (safetensors_bytes({"t": 5}), "tensor 't' must be an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lying_file_is_refused_with_file_and_tensor(tmp_path: Path, case: str) -> None:
    """B116: within a second, and without memory for what the file only claims to hold."""
    data, message = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ModelError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
            read_safetensors(path)
        assert time.process_time() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """B116."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, VALUES)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_safetensors(path)


def write_sharded(directory: Path, weight_map: object) -> None:
    write_safetensors(directory / "part-1.safetensors", {"a": VALUES["a"]})
    write_safetensors(directory / "part-2.safetensors", {"b": VALUES["b"]})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_model(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a": "part-1.safetensors", "b": "part-2.safetensors"})
    tensors = read_directory(tmp_path)
    assert {name: tensor.stored.tobytes() for name, tensor in tensors.items()} == {
        name: VALUES[name].tobytes() for name in ("a", "b")
    }


def test_a_link_to_a_shard_is_followed(tmp_path: Path) -> None:
    """The files of a model in a Hugging Face cache are links out of its directory."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_sharded(tmp_path / "blobs", {})
    (tmp_path / "snapshot" / "part-1.safetensors").symlink_to("../blobs/part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (tmp_path / "snapshot" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(read_directory(tmp_path / "snapshot")) == ["a"]


@pytest.mark.parametrize(
    "name",
    [
        "../part-1.safetensors",
        "/etc/passwd",
        "/part-1.safetensors",
        "sub/part-1.safetensors",
        "..\\part-1.safetensors",
        "a\0.safetensors",
        "..",
        "",
        "config.json",
        5,
        None,
        ["part-1.safetensors"],
    ],
)
def test_an_index_reaches_nothing_outside_its_directory(tmp_path: Path, name: object) -> None:
    write_sharded(tmp_path, {"a": name})
    with pytest.raises(
        ModelError, match=r"weight_map of tensor 'a' must name a \.safetensors file of the same directory"
    ):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map must be an object that names files"),
        ("part-1.safetensors", "weight_map must be an object that names files"),
        (None, "weight_map must be an object that names files"),
        ({"a": "part-3.safetensors"}, "part-3.safetensors: cannot be opened"),
        ({"a": "part-2.safetensors"}, "part-2.safetensors: tensor 'a' is missing"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    write_sharded(tmp_path, weight_map)
    with pytest.raises(ModelError, match=message):
        read_directory(tmp_path)


def test_one_file_of_any_name_is_a_model_and_two_are_not(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", {"a": VALUES["a"]})
    assert list(read_directory(tmp_path)) == ["a"]
    write_safetensors(tmp_path / "more.safetensors", {"b": VALUES["b"]})
    with pytest.raises(ModelError, match=r"holds 2 \*\.safetensors files"):
        read_directory(tmp_path)


SMALL = safetensors_bytes({"a": entry(0, 8), "b": entry(8, 20, [3, 1]), "__metadata__": {"k": "v"}}, bytes(range(20)))


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(SMALL) - 1), st.one_of(st.sampled_from(list(b'{}[]",:0129-aF')), st.integers(0, 255))
        ),
        min_size=1,
        max_size=4,
    ),
    end=st.integers(0, len(SMALL)),
    cut=st.booleans(),
)
def test_a_mutated_file_parses_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], end: int, cut: bool
) -> None:
    data = bytearray(SMALL)
    for position, byte in edits:
        data[position] = byte
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(data[:end] if cut else data)
    try:
        tensors = read_safetensors(path)
    except ModelError:
        return
    for tensor in tensors.values():
        assert tensor.stored.nbytes == np.prod(tensor.shape, dtype=int) * tensor.format.block_bytes

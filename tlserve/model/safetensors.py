"""The safetensors container, one file or several under an index, memory-mapped and checked before it is used.

Layout: the header's length u64, the header (a JSON object from tensor name to dtype, shape and data_offsets, the
bytes [begin, end) of the data section), the data section. The tensors must fill the data section exactly: no
overlap, no gap, nothing after the last, so that a file cut short or glued together does not load as other numbers.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tlserve.errors import ModelError
from tlserve.model.files import MAX_TABLE_BYTES, map_file, parse_json_object, read_json_object, shown
from tlserve.model.tensors import Format, Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FORMATS = {"F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}


def has_safetensors(directory: Path) -> bool:
    return any(directory.glob("*.safetensors")) or (directory / INDEX_NAME).exists()


def read_directory(directory: Path) -> dict[str, Tensor]:
    """The tensors of a model directory: model.safetensors, else those of the index, else the one *.safetensors.

    Raises ModelError naming the file and the tensor or key.
    """
    if (directory / SINGLE_NAME).exists():
        return read_safetensors(directory / SINGLE_NAME)
    if (directory / INDEX_NAME).exists():
        return _read_sharded(directory / INDEX_NAME)
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) != 1:
        raise ModelError(
            f"{directory}: holds {len(paths)} *.safetensors files and neither {SINGLE_NAME} nor {INDEX_NAME}"
        )
    return read_safetensors(paths[0])


def _read_sharded(index: Path) -> dict[str, Tensor]:
    weight_map = read_json_object(index, limit=MAX_TABLE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be an object that names files, got {shown(weight_map)}")
    names = {_shard_name(index, tensor, name) for tensor, name in weight_map.items()}
    shards = {name: read_safetensors(index.parent / name) for name in sorted(names)}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ModelError(f"{index.parent / name}: tensor {shown(tensor)} is missing, the index places it here")
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def _shard_name(index: Path, tensor: str, name: object) -> str:
    """A plain file name, so that an index reaches nothing outside its directory.

    Links are followed: in a Hugging Face cache every file of a model is one.
    """
    if isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and not set(name) & set("/\\"):
        return name
    raise ModelError(
        f"{index}: weight_map of tensor {shown(tensor)} must name a .safetensors file of the same directory,"
        f" got {shown(name)}"
    )


class _Entry(NamedTuple):
    begin: int
    end: int
    name: str
    format: Format
    shape: tuple[int, ...]


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, as views of the mapped file. Raises ModelError naming the file and the tensor."""
    data = np.frombuffer(map_file(path), np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_TABLE_BYTES):
        raise ModelError(
            f"{path}: the header is said to be {length} bytes long; the file has {len(data)},"
            f" and the most that is read is {MAX_TABLE_BYTES}"
        )
    header = parse_json_object(data[8 : 8 + length].tobytes(), path, "the header")
    header.pop("__metadata__", None)
    entries = sorted(_entry(path, name, value) for name, value in header.items())
    data = data[8 + length :]
    _check_tiling(path, entries, len(data))
    return {
        name: Tensor(
            name, shape, format, data[begin:end].reshape(math.prod(shape[:-1]), -1) if end > begin else data[:0]
        )
        for begin, end, name, format, shape in entries
    }


def _entry(path: Path, name: str, value: object) -> _Entry:
    """One checked row of the header; every size is a Python integer, so none wraps."""
    what = f"{path}: tensor {shown(name)}"
    if not isinstance(value, dict):
        raise ModelError(f"{what} must be an object, got {shown(value)}")
    dtype = value.get("dtype")
    format = _FORMATS.get(dtype) if isinstance(dtype, str) else None
    if format is None:
        raise ModelError(f"{what}: dtype {shown(dtype)} is not supported ({', '.join(_FORMATS)})")
    shape = _integers(value.get("shape"))
    if shape is None or len(shape) > 8:
        raise ModelError(f"{what}: shape must be a list of up to 8 sizes, got {shown(value.get('shape'))}")
    offsets = _integers(value.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{what}: data_offsets must be [begin, end], got {shown(value.get('data_offsets'))}")
    span, needed = offsets[1] - offsets[0], math.prod(shape) * format.block_bytes
    if span != needed:
        raise ModelError(f"{what}: data_offsets span {span} bytes, its shape and dtype need {needed}")
    return _Entry(offsets[0], offsets[1], name, format, tuple(shape))


def _integers(value: object) -> list[int] | None:
    """A list of integers that are not negative; None when it is anything else."""
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        return None
    return value


def _check_tiling(path: Path, entries: list[_Entry], size: int) -> None:
    """Each tensor begins where the one before it ends, and the last ends with the file."""
    if entries and entries[-1].end > size:
        name, end = entries[-1].name, entries[-1].end
        raise ModelError(f"{path}: tensor {shown(name)} ends at {end}, past the data section of {size} bytes")
    start = _Entry(0, 0, "", Format.F32, ())
    for before, entry in pairwise([start, *entries]):
        if entry.begin != before.end:
            problem = "overlaps the tensor before it" if entry.begin < before.end else "leaves a gap before it"
            raise ModelError(f"{path}: tensor {shown(entry.name)} begins at {entry.begin} and {problem}")
    if (entries[-1].end if entries else 0) != size:
        raise ModelError(f"{path}: the data section of {size} bytes goes on after the last tensor's end")

"""Writers of the two container formats, plain enough to write wrong files with."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DTYPES = {"float32": "F32", "float16": "F16"}


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.generic]]) -> None:
    header: dict[str, object] = {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    path.write_bytes(safetensors_bytes(header, data))


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header, well-formed or not; `length` lies about the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def gguf_string(text: str | bytes, *, length: int | None = None) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def gguf_field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_u32(key: str, value: int) -> bytes:
    return gguf_field(key, 4, struct.pack("<I", value))


def gguf_text(key: str, value: str) -> bytes:
    return gguf_field(key, 8, gguf_string(value))


def gguf_array(key: str, kind: int, elements: Sequence[bytes], *, count: int | None = None) -> bytes:
    header = struct.pack("<IQ", kind, len(elements) if count is None else count)
    return gguf_field(key, 9, header + b"".join(elements))


def gguf_info(
    name: str | bytes, dimensions: Sequence[int], kind: int, offset: int, *, num_dimensions: int | None = None
) -> bytes:
    """A row of the tensor table; `dimensions` innermost first."""
    count = len(dimensions) if num_dimensions is None else num_dimensions
    sizes = b"".join(struct.pack("<Q", size) for size in dimensions)
    return gguf_string(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    fields: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the counts may lie."""
    tensors = len(infos) if num_tensors is None else num_tensors
    keys = len(fields) if num_fields is None else num_fields
    table = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(fields) + b"".join(infos)
    padding = -len(table) % alignment if data else 0
    return table + bytes(padding) + data

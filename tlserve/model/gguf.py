"""The GGUF container: key-value fields, a table of tensors, and the tensors' bytes, from a memory-mapped file.

The file is not trusted.

Rule 1: a count or a length is compared with the bytes that are left before anything is made of that size.
Rule 2: sizes are Python integers, so no product of dimensions wraps.
Rule 3: whatever is wrong is a ModelError that names the file and the field or tensor.

Layout (versions 2 and 3, little-endian): magic, version u32, tensor count u64, field count u64; the fields, each
a key, a value type u32 and a value; the tensor infos, each a name, a number of dimensions u32, the dimensions
u64 innermost first, a type u32 and an offset u64; padding; the data section that the offsets count from.
A string is a length u64 and UTF-8 bytes; an array is an element type u32, a count u64 and the elements.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from tlserve.errors import ModelError
from tlserve.model.files import map_file, shown
from tlserve.model.tensors import Format, Tensor

Value = int | float | bool | str | list[str] | NDArray[np.generic]

_U32 = Struct("<I")
_U64 = Struct("<Q")
_SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_STRING, _ARRAY = 8, 9

# Formats that exist and are not computed with, so that a refusal can name them.
_OTHER_FORMATS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

# The largest published models have under 100 fields, about 3,000 tensors, and 262,144 tokens with 514,906 merges in
# some 15 MB. These bounds keep opening any file well under a second and its memory near what the largest need.
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 20  # of all arrays together
MAX_TABLE_BYTES = 1 << 26  # of all that comes before the tensors' bytes
MAX_KEY_BYTES = 65535  # the format's own limit
MAX_NAME_BYTES = 64  # the format's own limit
MAX_DIMENSIONS = 4  # the format's own limit
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
_FEWEST_FIELD_BYTES = 8 + 1 + 4 + 1  # key length, key, type, value
_FEWEST_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimension count, one dimension, type, offset


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a GGUF file holds. Numeric arrays and tensors are views of the mapped file.

    Tensors have their names in the file, shapes outermost axis first, rows in the file's order.
    """

    path: Path
    fields: dict[str, Value]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and check all of its structure. Raises ModelError naming the file and field or tensor."""
    cursor = _Cursor(map_file(path), path)
    num_tensors, num_fields = _read_header(cursor)
    fields = _read_fields(cursor, num_fields)
    alignment = _alignment(fields, path)
    infos = _read_infos(cursor, num_tensors)
    return GgufFile(path, fields, _tensors(cursor, infos, alignment))


@dataclass(slots=True)
class _Cursor:
    """A position in the file that never passes its end."""

    data: mmap.mmap
    path: Path
    position: int = 0
    elements_left: int = MAX_ELEMENTS

    def take(self, num_bytes: int, what: str) -> int:
        """Step over bytes that must exist; gives where they begin."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise self.fault(what, f"needs {num_bytes} bytes at {start}, the file has {len(self.data)}")
        self.position = start + num_bytes
        if self.position > MAX_TABLE_BYTES:
            raise self.fault(what, f"ends at {self.position}; fields and tensor table take at most {MAX_TABLE_BYTES}")
        return start

    def take_elements(self, count: int, what: str) -> None:
        """Count the elements of an array against what all arrays of a file may have."""
        if count > self.elements_left:
            raise self.fault(what, f"has {count} elements; all arrays together may have {MAX_ELEMENTS}")
        self.elements_left -= count

    def number(self, kind: Struct, what: str) -> int | float | bool:
        value: int | float | bool = kind.unpack_from(self.data, self.take(kind.size, what))[0]
        return value

    def u32(self, what: str) -> int:
        return int(self.number(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.number(_U64, what))

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fault(what, "is not UTF-8") from error

    def name(self, what: str, limit: int) -> str:
        """A string of 1 to `limit` bytes: the key of a field or the name of a tensor."""
        start = self.position
        length = self.u64(what)
        if not 1 <= length <= limit:
            raise self.fault(what, f"must be 1 to {limit} bytes long, got {length}")
        self.position = start
        return self.string(what)

    def fault(self, what: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {what} {problem}")


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """The counts of tensors and of fields."""
    start = cursor.take(4, "the magic")
    if cursor.data[start : start + 4] != b"GGUF":
        raise cursor.fault("the magic", "is not GGUF")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        problem = "says big-endian, which is not supported" if swapped in (2, 3) else "is not supported (2, 3)"
        raise cursor.fault(f"version {version}", problem)
    num_tensors = cursor.u64("the tensor count")
    num_fields = cursor.u64("the field count")
    left = len(cursor.data) - cursor.position
    for what, count, limit, fewest in (
        ("the tensor count", num_tensors, MAX_TENSORS, _FEWEST_INFO_BYTES),
        ("the field count", num_fields, MAX_FIELDS, _FEWEST_FIELD_BYTES),
    ):
        if count > limit or count * fewest > left:
            raise cursor.fault(what, f"is {count}; the limit is {limit}, and {left} bytes are left in the file")
    return num_tensors, num_fields


def _read_fields(cursor: _Cursor, count: int) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for index in range(count):
        key = cursor.name(f"the key of field {index}", MAX_KEY_BYTES)
        if key in fields:
            raise cursor.fault(f"field {shown(key)}", "appears twice")
        fields[key] = _read_value(cursor, f"field {shown(key)}")
    return fields


def _read_value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _SCALARS:
        raise cursor.fault(what, f"has the unknown value type {kind}")
    return cursor.number(_SCALARS[kind], what)


def _read_array(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(what)
    count = cursor.u64(what)
    cursor.take_elements(count, what)
    if kind == _STRING:
        return _read_strings(cursor, count, what)
    if kind == _ARRAY:
        raise cursor.fault(what, "is an array of arrays, which is not supported")
    if kind not in _SCALARS:
        raise cursor.fault(what, f"is an array of the unknown value type {kind}")
    dtype = np.dtype(_SCALARS[kind].format)
    start = cursor.take(count * dtype.itemsize, what)
    return np.frombuffer(cursor.data, dtype, count, start)


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """An array of strings. A vocabulary has a hundred thousand of them: this loop is what opening a file costs."""
    data, position, size = cursor.data, cursor.position, min(len(cursor.data), MAX_TABLE_BYTES)
    read_length, strings = _U64.unpack_from, []
    for index in range(count):
        start = position + 8
        if start > size:
            raise cursor.fault(what, f"string {index} begins past {size}, the end of what may be read")
        position = start + read_length(data, position)[0]
        if position > size:
            raise cursor.fault(what, f"string {index} ends past {size}, the end of what may be read")
        try:
            strings.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            raise cursor.fault(what, f"string {index} is not UTF-8") from error
    cursor.take(position - cursor.position, what)
    return strings


def _alignment(fields: dict[str, Value], path: Path) -> int:
    value = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is int and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0:
        return value
    raise ModelError(
        f"{path}: field general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {shown(value)}"
    )


@dataclass(frozen=True, slots=True)
class _Info:
    """One row of the tensor table; its sizes agree with each other, not yet with the file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    row_bytes: int
    num_rows: int
    offset: int  # from the data section

    @property
    def end(self) -> int:
        return self.offset + self.num_rows * self.row_bytes


def _read_infos(cursor: _Cursor, count: int) -> list[_Info]:
    infos: list[_Info] = []
    names: set[str] = set()
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in names:
            raise cursor.fault(f"tensor {shown(name)}", "appears twice")
        names.add(name)
        infos.append(_read_info(cursor, name))
    return infos


def _read_info(cursor: _Cursor, name: str) -> _Info:
    what = f"tensor {shown(name)}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fault(what, f"must have 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions}")
    dimensions = [cursor.u64(what) for _ in range(num_dimensions)]
    if 0 in dimensions:
        raise cursor.fault(what, f"has a dimension of 0: {dimensions}")
    format = _format(cursor, cursor.u32(what), what)
    columns = dimensions[0]
    if columns % format.block_size:
        raise cursor.fault(what, f"has rows of {columns}, not a multiple of the {format.block_size} of {format.name}")
    return _Info(
        name=name,
        shape=tuple(reversed(dimensions)),
        format=format,
        row_bytes=columns // format.block_size * format.block_bytes,
        num_rows=math.prod(dimensions[1:]),
        offset=cursor.u64(what),
    )


def _format(cursor: _Cursor, number: int, what: str) -> Format:
    try:
        return Format(number)
    except ValueError:
        known = ", ".join(format.name for format in Format)
        name = _OTHER_FORMATS.get(number, f"number {number}")
        raise cursor.fault(what, f"has type {name}, which is not supported ({known})") from None


def _tensors(cursor: _Cursor, infos: list[_Info], alignment: int) -> dict[str, Tensor]:
    """Views of the data section, after checking that each tensor lies inside it and none overlaps another."""
    start = -(-cursor.position // alignment) * alignment
    size = max(len(cursor.data) - start, 0)
    for info in infos:
        what = f"tensor {shown(info.name)}"
        if info.offset % alignment:
            raise cursor.fault(what, f"begins at {info.offset}, not a multiple of the alignment {alignment}")
        if info.end > size:
            raise cursor.fault(what, f"ends at {info.end}, past the data section of {size} bytes")
    for before, after in pairwise(sorted(infos, key=lambda info: info.offset)):
        if after.offset < before.end:
            raise cursor.fault(f"tensor {shown(after.name)}", f"overlaps tensor {shown(before.name)}")
    data = np.frombuffer(cursor.data, np.uint8)[start:]
    return {
        info.name: Tensor(
            info.name, info.shape, info.format, data[info.offset : info.end].reshape(info.num_rows, info.row_bytes)
        )
        for info in infos
    }

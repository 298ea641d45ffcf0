"""Opening the files of a model: regular files only, bounded reads, every failure a ModelError naming the file."""

from __future__ import annotations

import json
import mmap
import reprlib
import stat
from collections import Counter
from pathlib import Path

from tlserve.errors import ModelError

# Published configuration files take up to about 1 MB, sharded indexes and safetensors headers of the largest models
# 9 MB, tokenizers 35 MB. What is larger is not what its name says.
MAX_CONFIG_BYTES = 4 << 20
MAX_TABLE_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 64 << 20

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file for reading; pages are read from disk when they are first touched.

    The mapping lives as long as any array made from it.
    """
    _regular_size(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: a file of no bytes cannot be mapped
        raise ModelError(f"{path}: cannot be mapped: {_reason(error)}") from error


def read_bytes(path: Path, *, limit: int) -> bytes:
    """The contents of a file of at most `limit` bytes."""
    if _regular_size(path) > limit:
        raise ModelError(f"{path}: the file is larger than {limit} bytes, the most that is read of its kind")
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {_reason(error)}") from error


def read_text(path: Path) -> str:
    """The contents of a small UTF-8 file."""
    try:
        return read_bytes(path, limit=MAX_CONFIG_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from error


def read_json_object(path: Path, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The JSON object in a file of at most `limit` bytes."""
    return parse_json_object(read_bytes(path, limit=limit), path, "the file")


def parse_json_object(data: bytes, path: Path, what: str) -> dict[str, object]:
    """Parse `data`, the part of `path` that `what` names, as one JSON object without duplicate keys."""
    try:
        value = json.loads(data, object_pairs_hook=_object_without_duplicates)
    except RecursionError as error:
        raise ModelError(f"{path}: {what} is not usable JSON: nested too deeply") from error
    except ValueError as error:  # of the JSON, of its UTF-8, of a number with too many digits
        raise ModelError(f"{path}: {what} is not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {what} must be a JSON object, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value from a file as it is quoted in a message: one short printable line, whatever the file holds."""
    return _SHORT.repr(value)


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(key)} appears twice")
    return result


def _regular_size(path: Path) -> int:
    """The size of a file; refuses what could block or never end when it is read: pipes, devices, directories."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in a name that came from a file
        raise ModelError(f"{path}: cannot be opened: {_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: not a regular file")
    return status.st_size


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

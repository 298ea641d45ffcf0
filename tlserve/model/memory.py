"""How much memory there is, and how large the KV cache becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError

MIB = 1 << 20
# Where a control group's limit, its use, and the part of that which is only cached files are written: v2, then v1.
_CGROUP_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated without swapping: the system's, or what a container's limit leaves."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable")
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if available is None else available * 1024
    return min([least, *_left_by_cgroups(root)])


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What the limits of this process's group and of the groups around it leave; files cached can be dropped."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    groups = {group for line in lines for group in _and_parents(line.split(":", 2)[-1])} | {""}
    for mount, limit_file, usage_file, cached in _CGROUP_FILES:
        for group in sorted(groups):
            directory = root / mount / group
            limit, usage = _read(directory / limit_file).strip(), _read(directory / usage_file).strip()
            if limit.isdecimal() and usage.isdecimal():
                used = int(usage) - _numbers(directory / "memory.stat").get(cached, 0)
                yield max(0, int(limit) - used)


def _and_parents(group: str) -> Iterator[str]:
    path = PurePosixPath(group.lstrip("/"))
    yield from (str(item) for item in (path, *path.parents))


def _numbers(path: Path) -> dict[str, int]:
    """Name -> number of a file whose lines begin with both."""
    rows = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_fits(what: str, size: int, available: int | None = None) -> None:
    """Raises ConfigError when ``size`` bytes are more than there are."""
    free = available_memory() if available is None else available
    if size > free:
        raise ConfigError(f"{what} need {_mib(size)} of memory, and {_mib(free)} are free")


def num_kv_blocks(config: EngineConfig, *, block_bytes: int, max_model_len: int, available: int) -> int:
    """Blocks of the KV cache.

    ``num_blocks`` or ``kv_cache_mb`` where given; else what ``max_num_seqs`` requests of ``max_model_len`` tokens
    can use, but no more than half of the available memory. Pages of the cache are taken as they are first written.
    Raises ConfigError, naming the sizes, when that does not fit or is less than one block.
    """
    if config.num_blocks is not None:
        blocks, asked = config.num_blocks, f"num_blocks = {config.num_blocks}"
    elif config.kv_cache_mb is not None:
        blocks, asked = config.kv_cache_mb * MIB // block_bytes, f"kv_cache_mb = {config.kv_cache_mb}"
    else:
        most = config.max_num_seqs * -(-max_model_len // config.block_size)
        blocks, asked = min(most, available // 2 // block_bytes), "kv_cache_mb"
    if blocks < 1:
        raise ConfigError(f"{asked}: one KV block takes {_mib(block_bytes)}, and {_mib(available)} are free")
    if blocks * block_bytes > available:
        raise ConfigError(f"{asked}: needs {_mib(blocks * block_bytes)} of memory, and {_mib(available)} are free")
    return blocks


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"

"""How much memory there is, and how large the KV cache becomes."""

from __future__ import annotations

import os
from pathlib import Path

from tlserve.config import EngineConfig
from tlserve.errors import ConfigError

MIB = 1 << 20
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes that can still be allocated without swapping: the system's, or what a container's limit leaves."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = _read("/proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file in _CGROUP_LIMITS:
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def check_fits(what: str, size: int) -> None:
    """Raises ConfigError when ``size`` bytes are more than there are."""
    available = available_memory()
    if size > available:
        raise ConfigError(f"{what} need {_mib(size)} of memory, and {_mib(available)} are free")


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

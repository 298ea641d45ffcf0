"""What the figures were measured on, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from tests.bench.commands import Llama
from tlserve.kernels.jit import TARGET

READ_BYTES = 1 << 30
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8")


def describe() -> dict[str, str]:
    cpuinfo = _fields("/proc/cpuinfo")
    flags = set(cpuinfo.get("flags", "").split())
    memory = int(_fields("/proc/meminfo")["MemTotal"].split()[0]) / (1 << 20)
    return {
        "CPU": cpuinfo.get("model name", platform.processor()),
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction sets": " ".join(flag for flag in ISA_FLAGS if flag in flags),
        "kernels": TARGET.isa,
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def describe_peer(llama: Llama, build: str | None) -> dict[str, str]:
    """What is known of llama.cpp: what it says of itself, its package, and how it was built if somebody says so.

    A build from a package may know no commit; the package's version then says which release it is.
    """
    parts = [llama.package, llama.version, build]
    return {"llama.cpp": "; ".join(part for part in parts if part)}


def _fields(path: str) -> dict[str, str]:
    """The first value of each name in a /proc file."""
    fields: dict[str, str] = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


@numba.njit(nogil=True)
def _sum(numbers):  # type: ignore[no-untyped-def]
    """numbers [n] int64. A sum is the cheapest thing that must look at every byte."""
    total = np.int64(0)
    for i in range(numbers.size):
        total += numbers[i]
    return total


def read_bandwidth(num_threads: int, *, num_bytes: int = READ_BYTES) -> float:
    """Bytes/s of a plain sequential read, each thread its own part; the best of five."""
    numbers: NDArray[np.int64] = np.ones(num_bytes // 8, np.int64)
    parts = np.array_split(numbers, num_threads)
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(6):  # the first one compiles
            start = time.perf_counter()
            assert sum(pool.map(_sum, parts)) == numbers.size
            best = min(best, time.perf_counter() - start)
    return num_bytes / best

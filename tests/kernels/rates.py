"""How fast products are on one core, by format and number of columns: the figures of docs/kernels.md.

    python -m tests.kernels.rates [format ...]

Each figure is the best of many short runs. GMAC/s are billions of products added a second, from weights in the caches;
the last two columns stream 40 MB of weights past one column, beside a plain read of the same memory, in GB/s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.kernels.products import OFFSET, activations, packed, random_rows
from tlserve.kernels import leaves, pack
from tlserve.kernels.jit import TARGET, jit
from tlserve.kernels.layout import LAYOUTS, Layout
from tlserve.kernels.matmul import matmul
from tlserve.kernels.product import Product
from tlserve.kernels.simd import load_i32, splat_i32, store_i32

ROWS, K = 576, 768
COLUMNS = (1, 2, 4, 8, 16, 512)
STREAM_BYTES = 40_000_000
RUN_SECONDS, RUNS = 0.004, 40


@jit
def _repeat(p: Product, tiles: int, times: int) -> None:
    for _ in range(times):
        matmul(p, 0, tiles)


@jit
def _read(memory: NDArray[np.uint8], times: int, out: NDArray[np.int32]) -> None:
    a = b = c = d = splat_i32(0)
    for _ in range(times):
        for at in range(0, len(memory) - 255, 256):
            a, b = a ^ load_i32(memory, at), b ^ load_i32(memory, at + 64)
            c, d = c ^ load_i32(memory, at + 128), d ^ load_i32(memory, at + 192)
    store_i32(out, 0, a ^ b ^ c ^ d)


def _seconds(run: Callable[[int], None]) -> float:
    """Of one repetition at its best."""
    start = time.perf_counter()
    run(1)
    times = max(1, int(RUN_SECONDS / (time.perf_counter() - start)))
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        run(times)
        best = min(best, (time.perf_counter() - start) / times)
    return best


def _product(layout: Layout, arena: NDArray[np.uint8], rows: int, columns: int) -> Product:
    x = np.random.default_rng(0).standard_normal((columns, K), np.float32)
    lanes = min(columns, leaves.MAX_LANES)
    return Product(
        leaves.addresses([layout.code]), arena, layout.code, OFFSET, rows, K, -1, activations(layout, x, lanes), 0,
        columns, lanes, np.zeros(columns * rows, np.float32), 0, rows, False,
    )  # fmt: skip


def _rates(layout: Layout) -> list[float]:
    stored = random_rows(layout, ROWS, K, np.random.default_rng(0))
    arena = packed(layout, stored, K)
    figures = []
    for columns in COLUMNS:
        small = _product(layout, arena, ROWS, columns)
        seconds = _seconds(lambda times, small=small: _repeat(small, ROWS // 16, times))  # type: ignore[misc]
        figures.append(ROWS * K * columns / seconds / 1e9)
    copies = -(-STREAM_BYTES // pack.packed_bytes(layout, ROWS, K))
    large = packed(layout, np.tile(stored, (copies, 1)), K)
    stream = _product(layout, large, copies * ROWS, 1)
    figures.append(len(large) / _seconds(lambda times: _repeat(stream, copies * ROWS // 16, times)) / 1e9)
    figures.append(len(large) / _seconds(lambda times: _read(large, times, np.zeros(16, np.int32))) / 1e9)
    return figures


def main(names: list[str]) -> None:
    print(TARGET.isa, *(f"{columns:>6}" for columns in COLUMNS), "stream   read")
    for name in names or LAYOUTS:
        print(f"{name:6}", *(f"{figure:6.0f}" for figure in _rates(LAYOUTS[name])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

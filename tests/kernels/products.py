"""Weights of every format and their products, for the tests here; run as a module it prints a digest of products.

TLSERVE_ISA=avx2 python -m tests.kernels.products
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
from numpy.typing import NDArray

from tlserve.kernels import leaves, matmul, pack, product
from tlserve.kernels.jit import jit
from tlserve.kernels.layout import LAYOUTS, Layout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

OFFSET = 64  # of the weights in the arena of a product


def smallest_k(layout: Layout) -> int:
    """One block of a quantised format; a number that no vector divides for the others."""
    return layout.file_block if layout.is_quantised else 77


def random_rows(layout: Layout, rows: int, k: int, rng: np.random.Generator) -> Bytes:
    """Rows of a file: any bits for values and small scales, and sensible floats where a format has them."""
    if layout.name == "F32":
        return rng.standard_normal((rows, k), np.float32).view(np.uint8)
    if layout.name == "F16":
        return rng.standard_normal((rows, k), np.float32).astype(np.float16).view(np.uint8)
    if layout.name == "BF16":
        return np.ascontiguousarray(rng.standard_normal((rows, k), np.float32).view(np.uint16)[:, 1::2]).view(np.uint8)
    blocks = rng.integers(0, 256, (rows, k // layout.file_block, layout.file_bytes), np.uint8)
    starts = [208] if layout.halves else [0] if layout.offset else [0, 2]
    for start in starts:
        halves = rng.uniform(0.001, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, start : start + 2] = halves[..., np.newaxis].view(np.uint8)
    return blocks.reshape(rows, -1)


def packed(layout: Layout, stored: Bytes, k: int) -> Bytes:
    """An arena with the weights at OFFSET."""
    arena = pack.allocate(OFFSET + pack.packed_bytes(layout, len(stored), k))
    pack.pack(layout, stored, k, arena, OFFSET)
    return arena


@jit
def _write(x: Floats, quantised: bool, act: Bytes, lanes: int) -> None:
    columns, k = x.shape
    for column in range(columns):
        product.put_column(quantised, x[column], 0, 0, k, k, act, 0, column, lanes)


def activations(layout: Layout, x: Floats, lanes: int) -> Bytes:
    act = np.zeros(product.activation_bytes(*x.shape), np.uint8)
    _write(np.ascontiguousarray(x), bool(layout.is_quantised), act, lanes)
    return act


def multiply(
    layout: Layout,
    arena: Bytes,
    rows: int,
    x: Floats,
    *,
    lanes: int | None = None,
    cuts: tuple[int, ...] = (),
    bias: int = -1,
    y: Floats | None = None,
) -> Floats:
    """weights @ x.T as [columns, rows]; row tiles cut at ``cuts``, the last part first; with ``y``, added to it."""
    columns, k = x.shape
    lanes = lanes or min(columns, leaves.MAX_LANES)
    out = np.full((columns, rows), np.nan, np.float32) if y is None else y.copy()
    given = product.Product(
        leaves.addresses([layout.code]), arena, layout.code, OFFSET, rows, k, bias,
        activations(layout, x, lanes), 0, columns, lanes, out.reshape(-1), 0, rows, y is not None,
    )  # fmt: skip
    borders = [0, *cuts, -(-rows // 16)]
    for first, last in reversed(list(itertools.pairwise(borders))):
        matmul.matmul(given, first, last)
    return out


DIGESTED = ("BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")  # each kind of bits, scales and offsets once


def digest() -> str:
    """Of the bits of products of each kind of format, few columns and many."""
    rng = np.random.default_rng(5)
    bits = hashlib.sha256()
    for name in DIGESTED:
        layout = LAYOUTS[name]
        k = 3 * smallest_k(layout)
        arena = packed(layout, random_rows(layout, 21, k, rng), k)
        x = rng.standard_normal((7, k), np.float32)
        for columns in (1, 7):
            bits.update(multiply(layout, arena, 21, x[:columns]).tobytes())
    return bits.hexdigest()


if __name__ == "__main__":
    print(digest())

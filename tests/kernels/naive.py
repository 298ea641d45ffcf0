"""Slow and obvious versions of the kernels, and what is needed to call kernel pieces from Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlserve.kernels.jit import jit
from tlserve.kernels.pointwise import exp16
from tlserve.kernels.simd import load_f32, store_f32


@jit
def _exp_padded(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(0, x.size, 16):
        store_f32(out, i, exp16(load_f32(x, i)))


def exp_as_kernels(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp16 over a vector of any length; its accuracy has a test of its own."""
    padded = np.zeros(-(-x.size // 16) * 16, np.float32)
    padded[: x.size] = x
    out = np.empty_like(padded)
    _exp_padded(padded, out)
    return out[: x.size]


def attention(
    q: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32], position: int
) -> NDArray[np.float64]:
    """One query [head_dim] over keys and values [num_tokens, head_dim], of which it sees 0..position."""
    seen = slice(0, position + 1)
    scores = keys[seen].astype(np.float64) @ q.astype(np.float64) / np.sqrt(q.size)
    weights = np.exp(scores - scores.max())
    mixed: NDArray[np.float64] = weights / weights.sum() @ values[seen].astype(np.float64)
    return mixed

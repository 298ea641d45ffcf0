"""Random numbers that depend on a seed and an index alone.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, 2011). The key is the request's
seed, the counter the index of the token being drawn.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

import numpy as np
from numba import types

from tlserve.kernels.jit import entry, jit


@jit
def philox(seed: int, index: int) -> int:
    """The first two words of Philox4x32-10 with key ``seed`` and counter ``index``, as one 64-bit number."""
    key0, key1 = np.uint64(seed) & np.uint64(0xFFFFFFFF), np.uint64(seed) >> np.uint64(32)
    c0, c1 = np.uint64(index) & np.uint64(0xFFFFFFFF), np.uint64(index) >> np.uint64(32)
    c2 = c3 = np.uint64(0)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ key0,
            product1 & np.uint64(0xFFFFFFFF),
            (product0 >> np.uint64(32)) ^ c3 ^ key1,
            product0 & np.uint64(0xFFFFFFFF),
        )
        key0 = (key0 + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
        key1 = (key1 + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF)
    return (c1 << np.uint64(32)) | c0


@entry(types.float64(types.int64, types.int64))
def stream(seed: int, index: int) -> float:
    """The uniform number in [0, 1) that draws token ``index`` of a request with ``seed`` (int64 both)."""
    return np.float64(philox(seed, index) >> np.uint64(11)) * 2.0**-53

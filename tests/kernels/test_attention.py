"""Paged attention against the textbook, and its bits against itself under every way to cut the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels import naive
from tlserve.kernels.attention import attend, attention_addresses, scratch_floats
from tlserve.kernels.jit import jit
from tlserve.kernels.kv_cache import sub_block_bytes, write_kv

Floats = NDArray[np.float32]


@jit
def _run(
    number: int, kernels: NDArray[np.int64], q: Floats, keys: Floats, values: Floats, kv: NDArray[np.uint8],
    table: NDArray[np.int32], head: int, num_kv_heads: int,
    group: int, head_dim: int, block_size: int, cuts: NDArray[np.int64],
    out: Floats, scratch: Floats,
) -> None:  # fmt: skip
    """Writes every token of one request, then attends in runs that end at ``cuts``."""
    num_heads = group * num_kv_heads
    num_tokens = q.size // (num_heads * head_dim)
    sub = sub_block_bytes(head_dim, number)
    head_size = sub * (block_size // 16)
    block_stride = num_kv_heads * head_size
    for t in range(num_tokens):
        at = table[0, t // block_size] * block_stride + head * head_size + t % block_size // 16 * sub
        write_kv(number, True, kv, at, t % 16, head_dim, keys, t * head_dim)
        write_kv(number, False, kv, at, t % 16, head_dim, values, t * head_dim)
    row = num_heads * head_dim
    start = 0
    for stop in cuts:
        at = start * row + head * group * head_dim
        attend(
            kernels, q, at, row, stop - start, group, head_dim, start,
            kv, head * head_size, table, 0, block_size, block_stride, out, at, row, scratch,
            (num_kv_heads - 1) * head_size, 0, num_tokens - 1,
        )  # fmt: skip
        start = stop


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    number: int = 2  # bytes
    block_size: int = 16

    def inputs(self) -> tuple[Floats, Floats, Floats]:
        """q [tokens, heads, dim]; keys and values [kv_heads, tokens, dim], rounded to f16 where the cache is."""
        rng = np.random.default_rng(self.num_tokens)
        q = rng.normal(0, 2, (self.num_tokens, self.num_heads, self.head_dim)).astype(np.float32)
        kv = rng.normal(0, 1, (2, self.num_kv_heads, self.num_tokens, self.head_dim)).astype(np.float32)
        if self.number == 2:
            kv = kv.astype(np.float16).astype(np.float32)
        return q, kv[0], kv[1]

    def run(self, step: int = 1, order: int = 0, fill: int = 0) -> Floats:
        """The output [tokens, heads, dim], attending ``step`` tokens at a time, in blocks shuffled by ``order``."""
        q, keys, values = self.inputs()
        num_blocks = -(-self.num_tokens // self.block_size)
        table = np.random.default_rng(order).permutation(num_blocks + 2)[None, :num_blocks].astype(np.int32)
        sub = sub_block_bytes(self.head_dim, self.number)
        size = (num_blocks + 2) * self.num_kv_heads * self.block_size // 16 * sub
        kv = np.full(size, fill, np.uint8)
        out = np.zeros(q.size, np.float32)
        # A run never leaves its 16 positions.
        stops = sorted({*range(16, self.num_tokens, 16), *range(step, self.num_tokens, step), self.num_tokens})
        cuts = np.array(stops, np.int64)
        kernels = attention_addresses(self.num_heads // self.num_kv_heads, self.number)
        scratch = np.full(scratch_floats(self.head_dim), np.nan, np.float32)
        for head in range(self.num_kv_heads):
            _run(
                self.number, kernels, q.reshape(-1), keys[head].reshape(-1), values[head].reshape(-1), kv, table, head,
                self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim, self.block_size,
                cuts, out, scratch,
            )  # fmt: skip
        return out.reshape(q.shape)


CASES = [
    Case(1, 1, 1, 8),
    Case(17, 2, 1, 16),
    Case(40, 9, 3, 64),
    Case(40, 9, 3, 64, number=4, block_size=32),
    Case(130, 7, 1, 24, block_size=64),
    Case(70, 16, 1, 128, number=4),
    Case(33, 4, 4, 20),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_textbooks(case: Case) -> None:
    q, keys, values = case.inputs()
    out = case.run(step=16)
    group = case.num_heads // case.num_kv_heads
    for t in range(case.num_tokens):
        for h in range(case.num_heads):
            expected = naive.attention(q[t, h], keys[h // group], values[h // group], t)
            np.testing.assert_allclose(out[t, h], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_bits_do_not_depend_on_how_many_tokens_come_together(case: Case, step: int) -> None:
    assert case.run(step=step).tobytes() == case.run(step=16).tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_which_blocks_a_request_has(case: Case) -> None:
    assert case.run(order=1).tobytes() == case.run(order=2).tobytes()


@pytest.mark.parametrize("fill", [0x7C, 0xFF], ids=["infinite", "nan"])
def test_what_a_block_held_before_does_not_matter(fill: int) -> None:
    case = CASES[2]
    assert case.run(step=16, fill=fill).tobytes() == case.run(step=16).tobytes()


def test_a_value_too_large_for_the_cache_stays_finite() -> None:
    """An infinity in a token that others do not see would make their sums NaN."""
    kv = np.zeros(sub_block_bytes(16, 2), np.uint8)
    huge = np.full(16, 1e9, np.float32)
    for is_key in (True, False):
        write_kv(2, is_key, kv, 0, 3, 16, huge, 0)
    assert np.isfinite(kv.view(np.float16)).all()
    assert kv.view(np.float16)[3] == np.float16(65504)

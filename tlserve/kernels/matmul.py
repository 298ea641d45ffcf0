"""Weights times activations, for every format and any number of columns (tokens).

    y[c, r] = start + sum over k of weight[r, k] * activation[c, k]

Order of operations, the same for every number of columns, every split over threads and every ISA. The start is the
bias, or 0, plus y[c, r] itself when accumulating. Then quantised formats add one group of 32 k after the other: the
integer dot product is exact, and is scaled as tile.add_group says. Float formats add one product after the other, each
with one fma.

Up to DIRECT_COLUMNS columns multiply the packed weights as they stream by. More than that share the work of taking them
apart: a few tiles at a time are spread out in scratch, small enough to stay in the first-level cache, and every column
passes over them.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlserve.kernels.emit import address
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.layout import BLOCK_BYTES, BLOCK_GROUPS, GROUP, K_BYTES, ROWS, TABLE, WIDE_AFFINE, WIDE_BYTES
from tlserve.kernels.leaves import ACCUMULATE, DIRECT, PREFETCH, REPLACE, RESUME, WIDE, WIDEN, call_tiles, call_widen
from tlserve.kernels.product import Product, is_quantised
from tlserve.kernels.tile import RECORD

Bytes = NDArray[np.uint8]

DIRECT_COLUMNS = 4
WIDE_GROUPS = 40  # groups spread out at a time: 25 kB
WIDE_CHUNK = 24  # of one tile, a multiple of a K block: 512 columns of so many are 786 kB, and stay in the second level
FLOAT_TILES = 4  # tiles of floats spread out at a time
FLOAT_CHUNK = 96  # k of each: 25 kB
SCRATCH_BYTES = WIDE_GROUPS * WIDE_AFFINE.group_bytes + 64  # of each thread


@jit
def matmul(p: Product, first: int, last: int, scratch: Bytes, scratch_at: int) -> None:
    """All columns of the row tiles [first, last) of a product: rows [16 * first, 16 * last), cut at p.rows.

    ``scratch`` from byte scratch_at on has SCRATCH_BYTES of the calling thread's own. Pieces of one product may run at
    the same time.
    """
    layout = TABLE[p.code]
    quantised = is_quantised(p.code)
    block = layout[BLOCK_GROUPS] if quantised else 1  # groups or k
    block_bytes = layout[BLOCK_BYTES] if quantised else layout[K_BYTES]
    depth = p.k // GROUP if quantised else p.k  # likewise
    tile_step = depth // block * block_bytes
    weights = address(p.arena, p.offset)
    if p.columns <= DIRECT_COLUMNS:
        weights += first * tile_step
        _run(p, DIRECT, first, last - first, 0, p.columns, 0, weights, tile_step, depth // block, PREFETCH)
        return
    chunk = WIDE_CHUNK if quantised else FLOAT_CHUNK
    for start in range(0, depth, chunk):
        length = min(chunk, depth - start)
        together = WIDE_GROUPS // length if quantised else FLOAT_TILES
        for tile in range(first, last, together):
            tiles = min(together, last - tile)
            at = weights + tile * tile_step + start // block * block_bytes
            _spread_out(p, at, tile_step, length, block, tile, tiles, start, address(scratch, scratch_at))


@inline
def _spread_out(
    p: Product, at: int, tile_step: int, length: int, block: int, tile: int, tiles: int, start: int, scratch: int
) -> None:
    """Adds groups or k [start, start + length) of a few tiles to every column."""
    widen = p.kernels[p.code, WIDEN]
    if widen != 0:
        call_widen(widen, at, tile_step, length // block, scratch, tiles)
        at, tile_step = scratch, length * TABLE[p.code, WIDE_BYTES]
    for column in range(0, p.columns, p.lanes):
        end = min(column + p.lanes, p.columns)
        _run(p, WIDE, tile, tiles, column, end, start, at, tile_step, length, 0)


@jit
def _run(
    p: Product, slot: int, tile: int, tiles: int, column: int, end: int, start: int,
    weights: int, tile_step: int, blocks: int, ahead: int,
) -> None:  # fmt: skip
    """Columns [column, end) of one run of lanes, in as few register tiles as there can be.

    The weights are ``blocks`` blocks of each of the row tiles from ``tile`` on, beginning at group or k ``start``.
    """
    quantised = is_quantised(p.code)
    unit = RECORD if quantised else 4
    depth = p.k // GROUP if quantised else p.k
    act = address(p.act, p.act_at) + (column // p.lanes * depth + start) * p.lanes * unit
    row = ROWS * tile
    bias = address(p.arena, p.bias + 4 * row) if p.bias >= 0 else 0
    mode = RESUME if start > 0 else ACCUMULATE if p.accumulate else REPLACE
    while column < end:
        left = end - column
        power = 3 if left >= 8 else 2 if left >= 4 else 1 if left >= 2 else 0
        call_tiles(
            p.kernels[p.code, slot + power], weights, tile_step, blocks, act + column % p.lanes * unit, p.lanes * unit,
            address(p.y, p.y_at + column * p.y_stride + row), 4 * p.y_stride, p.rows - row, bias, mode, tiles, ahead,
        )  # fmt: skip
        column += 1 << power

"""Weights times activations, for every format and any number of columns (tokens).

    y[c, r] = start + sum over k of weight[r, k] * activation[c, k]

Order of operations, the same for every number of columns, every split over threads and every ISA. The start is the
bias, or 0, plus y[c, r] itself when accumulating. Then quantised formats add one group of 32 k after the other: the
integer dot product is exact, and is scaled as tile.add_group says. Float formats add one product after the other, each
with one fma.

Few columns multiply the weights of whole rows as they stream by. With many, a few tiles and a stretch of k at a time
meet all columns, so that both stay in the first-level cache.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

from tlserve.kernels.emit import address
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.layout import BLOCK_BYTES, BLOCK_GROUPS, GROUP, K_BYTES, ROWS, TABLE
from tlserve.kernels.leaves import ACCUMULATE, REPLACE, RESUME, call_tiles
from tlserve.kernels.product import Product, is_quantised
from tlserve.kernels.tile import RECORD

FEW = 16  # columns whose activations, all k of them, stay in the caches while weights stream by
# With more columns, the k, groups or else floats, that are added to all of them before the next; and the row tiles that
# are multiplied together. Weights of so many and activations of one run of lanes stay in the first-level cache.
CHUNK, CHUNK_FLOATS = 18, 144
TILES = 4
PREFETCH = 8192  # bytes ahead in a stream of packed weights, so that pieces begin with what has been fetched


@jit
def matmul(p: Product, first: int, last: int) -> None:
    """All columns of the row tiles [first, last) of a product: rows [16 * first, 16 * last), cut at p.rows.

    Pieces of one product may run at the same time.
    """
    layout = TABLE[p.code]
    quantised = is_quantised(p.code)
    block = layout[BLOCK_GROUPS] if quantised else 1  # groups or k
    block_bytes = layout[BLOCK_BYTES] if quantised else layout[K_BYTES]
    depth = p.k // GROUP if quantised else p.k  # likewise
    tile_step = depth // block * block_bytes
    weights = address(p.arena, p.offset)
    chunk = depth if p.columns <= FEW else _even_share(depth, CHUNK if quantised else CHUNK_FLOATS, block)
    # One run of columns streams the weights. Where there are more, each fetches its share of the next tiles: if the
    # first did it alone, it would wait for memory, and memory for the others.
    runs = (p.columns + p.lanes - 1) // p.lanes
    ahead = PREFETCH if runs == 1 else TILES * tile_step
    for start in range(0, depth, chunk):
        blocks = min(chunk, depth - start) // block
        for tile in range(first, last, TILES):
            tiles = min(TILES, last - tile)
            at = weights + tile * tile_step + start // block * block_bytes
            for run in range(runs):
                fetch, fetch_end = tiles * run // runs, tiles * (run + 1) // runs
                _run(p, tile, tiles, run, start, at, tile_step, blocks, ahead, fetch, fetch_end)


@inline
def _even_share(depth: int, most: int, block: int) -> int:
    """The size of equal shares of ``depth``, about ``most`` each, in whole blocks: a small last one costs as much."""
    shares = (depth + most - 1) // most
    return ((depth + shares - 1) // shares + block - 1) // block * block


@jit
def _run(
    p: Product, tile: int, tiles: int, run: int, start: int,
    weights: int, tile_step: int, blocks: int, ahead: int, fetch: int, fetch_end: int,
) -> None:  # fmt: skip
    """One run of columns, in as few register tiles as there can be.

    The weights are ``blocks`` blocks of each of the row tiles from ``tile`` on, beginning at group or k ``start``.
    """
    quantised = is_quantised(p.code)
    unit = RECORD if quantised else 4
    depth = p.k // GROUP if quantised else p.k
    column, end = run * p.lanes, min((run + 1) * p.lanes, p.columns)
    act = address(p.act, p.act_at) + (run * depth + start) * p.lanes * unit
    row = ROWS * tile
    bias = address(p.arena, p.bias + 4 * row) if p.bias >= 0 else 0
    mode = RESUME if start > 0 else ACCUMULATE if p.accumulate else REPLACE
    while column < end:
        left = end - column
        power = 3 if left >= 8 else 2 if left >= 4 else 1 if left >= 2 else 0
        call_tiles(
            p.kernels[p.code, power], weights, tile_step, blocks, act + column % p.lanes * unit, p.lanes * unit,
            address(p.y, p.y_at + column * p.y_stride + row), 4 * p.y_stride, p.rows - row, bias, mode,
            tiles, ahead, fetch, fetch_end,
        )  # fmt: skip
        column += 1 << power
        fetch_end = fetch  # the rest of the run finds them under way

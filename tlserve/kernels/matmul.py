"""Weights times activations, for every format and any number of columns (tokens).

    y[c, r] = start + sum over k of weight[r, k] * activation[c, k]

Order of operations, the same for every number of columns, every split over threads and every ISA. The start is the
bias, or 0, plus y[c, r] itself when accumulating. Then quantised formats add one group of 32 k after the other: the
integer dot product is exact, and is scaled as ``add_group`` says. Float formats add one product after the other, each
with one fma.

Up to DIRECT_COLUMNS columns multiply the packed weights as they stream by. More than that share the work of taking them
apart: a few tiles at a time are spread out in scratch, small enough to stay in the first-level cache, and every column
passes over them.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlserve.kernels import layout as layouts
from tlserve.kernels.emit import Static
from tlserve.kernels.jit import inline, jit
from tlserve.kernels.layout import BY_CODE, GROUP, ROWS
from tlserve.kernels.product import Product, is_quantised
from tlserve.kernels.simd import prefetch, store_f32
from tlserve.kernels.tile import (
    RECORD,
    add_columns,
    add_group,
    add_product,
    load_columns,
    load_floats,
    load_scale,
    load_second,
    load_values,
    repeat_rows,
    store_columns,
    store_wide,
    zero_columns,
)

Bytes = NDArray[np.uint8]

DIRECT_COLUMNS = 4
WIDE_GROUPS = 40  # groups spread out at a time: 25 kB
WIDE_CHUNK = 24  # of one tile, a multiple of a K block: 512 columns of so many are 786 kB, and stay in the second level
FLOAT_CHUNK = 192  # k of FLOAT_TILES tiles of floats spread out at a time: 24 kB
FLOAT_TILES = 2
SCRATCH_BYTES = WIDE_GROUPS * layouts.WIDE_AFFINE.group_bytes + 64  # of each thread
PREFETCH = 2048  # bytes

ONE, TWO, FOUR, EIGHT = Static(1), Static(2), Static(4), Static(8)
F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = (Static(layout) for layout in BY_CODE)
WIDE_AFFINE, WIDE_OFFSET, WIDE_HALVES = (
    Static(layout) for layout in (layouts.WIDE_AFFINE, layouts.WIDE_OFFSET, layouts.WIDE_HALVES)
)
C_F32, C_F16, C_BF16, C_Q4_0, C_Q4_1, C_Q5_0, C_Q5_1, C_Q8_0, C_Q4_K, C_Q5_K, C_Q6_K = range(len(BY_CODE))


def prepare(codes: Iterable[int]) -> NDArray[np.int64]:
    """Makes products with weights of these layouts ready to run; what it gives goes into every Product."""
    return np.zeros(len(list(codes)), np.int64)


@jit
def matmul(p: Product, first: int, last: int, scratch: Bytes, scratch_at: int) -> None:
    """All columns of the row tiles [first, last) of a product: rows [16 * first, 16 * last), cut at p.rows.

    ``scratch`` from byte scratch_at on has SCRATCH_BYTES of the calling thread's own. Pieces of one product may run at
    the same time.
    """
    if is_quantised(p.code):
        if p.columns <= DIRECT_COLUMNS:
            _direct_all(p, first, last)
        else:
            _wide_any(p, first, last, scratch, scratch_at)
    elif p.code == C_BF16:
        _floats(p, BF16, first, last, scratch, scratch_at)
    elif p.code == C_F16:
        _floats(p, F16, first, last, scratch, scratch_at)
    else:
        _floats(p, F32, first, last, scratch, scratch_at)


# ---- one register tile ----


@inline
def _start(p: Product, tiles: Any, width: Any, row: int, at: int, resume: bool) -> Any:
    """What the sums of rows from ``row`` on begin with; y of the first column is at ``at``. resume = y as it is."""
    count = np.int32(p.rows - row)
    if resume:
        return load_columns(tiles, width, p.y, at, p.y_stride, count)
    columns = zero_columns(tiles, width)
    if p.bias >= 0:
        columns = repeat_rows(tiles, width, p.arena, p.bias + 4 * row, count)
    if p.accumulate:
        columns = add_columns(columns, load_columns(tiles, width, p.y, at, p.y_stride, count))
    return columns


@inline
def _add_groups(
    layout: Any, columns: Any, weights: Bytes, at: int, blocks: int, act: Bytes, record: int, step: int
) -> Any:
    """Adds ``blocks`` blocks of groups; the records of one group are ``step`` bytes after those of the one before."""
    for _ in range(blocks):
        header = at
        at += layout.header_bytes
        for _ in range(layout.block_groups):
            prefetch(weights, at + PREFETCH)
            values = load_values(layout, weights, at)
            scale = load_scale(layout, weights, header, weights, at)
            second = load_second(layout, weights, header, weights, at)
            columns = add_group(layout, columns, values, scale, second, act, record)
            at += layout.group_bytes
            record += step
    return columns


# ---- quantised weights, few columns ----


@jit
def _direct(p: Product, layout: Any, width: Any, column: int, first: int, last: int) -> None:
    """Columns [column, column + width), of one run of lanes, of row tiles [first, last)."""
    blocks = p.k // (GROUP * layout.block_groups)
    record = p.act_at + (column // p.lanes * (p.k // GROUP) * p.lanes + column % p.lanes) * RECORD
    for tile in range(first, last):
        row = ROWS * tile
        at = p.y_at + column * p.y_stride + row
        columns = _start(p, ONE, width, row, at, False)
        weights = p.offset + tile * blocks * layout.block_bytes
        columns = _add_groups(layout, columns, p.arena, weights, blocks, p.act, record, p.lanes * RECORD)
        store_columns(ONE, width, columns, p.y, at, p.y_stride, np.int32(p.rows - row))


@jit
def _direct_any(p: Product, width: Any, column: int, first: int, last: int) -> None:
    if p.code == C_Q4_0:
        _direct(p, Q4_0, width, column, first, last)
    elif p.code == C_Q4_1:
        _direct(p, Q4_1, width, column, first, last)
    elif p.code == C_Q5_0:
        _direct(p, Q5_0, width, column, first, last)
    elif p.code == C_Q5_1:
        _direct(p, Q5_1, width, column, first, last)
    elif p.code == C_Q8_0:
        _direct(p, Q8_0, width, column, first, last)
    elif p.code == C_Q4_K:
        _direct(p, Q4_K, width, column, first, last)
    elif p.code == C_Q5_K:
        _direct(p, Q5_K, width, column, first, last)
    else:
        _direct(p, Q6_K, width, column, first, last)


@jit
def _direct_all(p: Product, first: int, last: int) -> None:
    """Every column, when they are one run of lanes at most."""
    column = 0
    if p.columns - column >= 4:
        _direct_any(p, FOUR, column, first, last)
        column += 4
    if p.columns - column >= 2:
        _direct_any(p, TWO, column, first, last)
        column += 2
    if p.columns > column:
        _direct_any(p, ONE, column, first, last)


# ---- quantised weights, many columns ----


@jit
def _widen(p: Product, layout: Any, wide: Any, at: int, groups: int, scratch: Bytes, to: int) -> None:
    """Spreads ``groups`` groups from byte ``at`` of the arena out in scratch, from byte ``to`` on."""
    for _ in range(groups // layout.block_groups):
        header = at
        at += layout.header_bytes
        for _ in range(layout.block_groups):
            store_wide(layout, load_values(layout, p.arena, at), scratch, to)
            store_f32(scratch, to + wide.values_bytes, load_scale(layout, p.arena, header, p.arena, at))
            # Without a second scale this is where the next group's values go.
            second = load_second(layout, p.arena, header, p.arena, at)
            store_f32(scratch, to + wide.values_bytes + wide.scale_bytes, second)
            at += layout.group_bytes
            to += wide.group_bytes


@jit
def _wide_columns(
    p: Product, wide: Any, width: Any, column: int, row: int, group: int, groups: int, scratch: Bytes, at: int
) -> None:
    """Adds groups [group, group + groups) of a tile, spread out at byte ``at`` of scratch, to ``width`` columns."""
    y_at = p.y_at + column * p.y_stride + row
    columns = _start(p, ONE, width, row, y_at, group > 0)
    record = p.act_at + ((column // p.lanes * (p.k // GROUP) + group) * p.lanes + column % p.lanes) * RECORD
    columns = _add_groups(wide, columns, scratch, at, groups, p.act, record, p.lanes * RECORD)
    store_columns(ONE, width, columns, p.y, y_at, p.y_stride, np.int32(p.rows - row))


@jit
def _wide_run(
    p: Product, wide: Any, column: int, end: int, row: int, group: int, groups: int, scratch: Bytes, at: int
) -> None:
    """Columns [column, end) of one run of lanes, in as few register tiles as there can be."""
    while end - column >= 8:
        _wide_columns(p, wide, EIGHT, column, row, group, groups, scratch, at)
        column += 8
    if end - column >= 4:
        _wide_columns(p, wide, FOUR, column, row, group, groups, scratch, at)
        column += 4
    if end - column >= 2:
        _wide_columns(p, wide, TWO, column, row, group, groups, scratch, at)
        column += 2
    if end > column:
        _wide_columns(p, wide, ONE, column, row, group, groups, scratch, at)


@jit
def _wide(p: Product, layout: Any, wide: Any, first: int, last: int, scratch: Bytes, scratch_at: int) -> None:
    """All columns of row tiles [first, last)."""
    groups = p.k // GROUP
    tile_bytes = groups // layout.block_groups * layout.block_bytes
    for group in range(0, groups, WIDE_CHUNK):
        chunk = min(WIDE_CHUNK, groups - group)
        start = p.offset + group // layout.block_groups * layout.block_bytes
        together = WIDE_GROUPS // chunk
        for tile in range(first, last, together):
            tiles = min(together, last - tile)
            for t in range(tiles):
                _widen(
                    p,
                    layout,
                    wide,
                    start + (tile + t) * tile_bytes,
                    chunk,
                    scratch,
                    scratch_at + t * chunk * wide.group_bytes,
                )
            for column in range(0, p.columns, p.lanes):
                end = min(column + p.lanes, p.columns)
                for t in range(tiles):
                    at = scratch_at + t * chunk * wide.group_bytes
                    _wide_run(p, wide, column, end, ROWS * (tile + t), group, chunk, scratch, at)


@jit
def _wide_any(p: Product, first: int, last: int, scratch: Bytes, scratch_at: int) -> None:
    if p.code == C_Q4_0:
        _wide(p, Q4_0, WIDE_OFFSET, first, last, scratch, scratch_at)
    elif p.code == C_Q4_1:
        _wide(p, Q4_1, WIDE_AFFINE, first, last, scratch, scratch_at)
    elif p.code == C_Q5_0:
        _wide(p, Q5_0, WIDE_OFFSET, first, last, scratch, scratch_at)
    elif p.code == C_Q5_1:
        _wide(p, Q5_1, WIDE_AFFINE, first, last, scratch, scratch_at)
    elif p.code == C_Q8_0:
        _wide(p, Q8_0, WIDE_OFFSET, first, last, scratch, scratch_at)
    elif p.code == C_Q4_K:
        _wide(p, Q4_K, WIDE_AFFINE, first, last, scratch, scratch_at)
    elif p.code == C_Q5_K:
        _wide(p, Q5_K, WIDE_AFFINE, first, last, scratch, scratch_at)
    else:
        _wide(p, Q6_K, WIDE_HALVES, first, last, scratch, scratch_at)


# ---- float weights ----


@inline
def _add_products(
    layout: Any, width: Any, columns: Any, weights: Bytes, at: int, stride: int, k: int, act: Bytes, x: int, step: int
) -> Any:
    """Adds k products; tiles are ``stride`` bytes apart, activations of one k ``step`` bytes after those before."""
    for _ in range(k):
        columns = add_product(layout, width, columns, weights, at, stride, act, x)
        at += layout.k_bytes
        x += step
    return columns


@jit
def _float_direct(p: Product, layout: Any, tiles: Any, width: Any, column: int, tile: int) -> None:
    """Columns [column, column + width) of a few row tiles; the columns share a run of lanes."""
    row = ROWS * tile
    y_at = p.y_at + column * p.y_stride + row
    columns = _start(p, tiles, width, row, y_at, False)
    stride = p.k * layout.k_bytes
    x = p.act_at + 4 * (column // p.lanes * p.k * p.lanes + column % p.lanes)
    columns = _add_products(
        layout, width, columns, p.arena, p.offset + tile * stride, stride, p.k, p.act, x, 4 * p.lanes
    )
    store_columns(tiles, width, columns, p.y, y_at, p.y_stride, np.int32(p.rows - row))


@jit
def _float_direct_tiles(p: Product, layout: Any, width: Any, column: int, first: int, last: int) -> None:
    tile = first
    while last - tile >= 4:
        _float_direct(p, layout, FOUR, width, column, tile)
        tile += 4
    while tile < last:
        _float_direct(p, layout, ONE, width, column, tile)
        tile += 1


@jit
def _float_widen(p: Product, layout: Any, tile: int, start: int, k: int, scratch: Bytes, to: int) -> None:
    """Writes k [start, start + k) of a tile as float32."""
    at = p.offset + (tile * p.k + start) * layout.k_bytes
    for _ in range(k):
        store_f32(scratch, to, load_floats(layout, p.arena, at))
        at += layout.k_bytes
        to += 4 * ROWS


@jit
def _float_wide(
    p: Product, tiles: Any, width: Any, column: int, tile: int, start: int, k: int, scratch: Bytes, at: int
) -> None:
    """Adds k [start, start + k) of a few tiles, as float32 at byte ``at`` of scratch, to ``width`` columns."""
    row = ROWS * tile
    y_at = p.y_at + column * p.y_stride + row
    columns = _start(p, tiles, width, row, y_at, start > 0)
    x = p.act_at + 4 * ((column // p.lanes * p.k + start) * p.lanes + column % p.lanes)
    columns = _add_products(F32, width, columns, scratch, at, k * 4 * ROWS, k, p.act, x, 4 * p.lanes)
    store_columns(tiles, width, columns, p.y, y_at, p.y_stride, np.int32(p.rows - row))


@jit
def _float_wide_run(
    p: Product, tiles: Any, column: int, end: int, tile: int, start: int, k: int, scratch: Bytes, at: int
) -> None:
    """Columns [column, end) of one run of lanes, in as few register tiles as there can be."""
    while end - column >= 8:
        _float_wide(p, tiles, EIGHT, column, tile, start, k, scratch, at)
        column += 8
    if end - column >= 4:
        _float_wide(p, tiles, FOUR, column, tile, start, k, scratch, at)
        column += 4
    if end - column >= 2:
        _float_wide(p, tiles, TWO, column, tile, start, k, scratch, at)
        column += 2
    if end > column:
        _float_wide(p, tiles, ONE, column, tile, start, k, scratch, at)


@jit
def _floats(p: Product, layout: Any, first: int, last: int, scratch: Bytes, scratch_at: int) -> None:
    if p.columns <= DIRECT_COLUMNS:
        column = 0
        if p.columns - column >= 4:
            _float_direct_tiles(p, layout, FOUR, column, first, last)
            column += 4
        if p.columns - column >= 2:
            _float_direct_tiles(p, layout, TWO, column, first, last)
            column += 2
        if p.columns > column:
            _float_direct_tiles(p, layout, ONE, column, first, last)
        return
    for start in range(0, p.k, FLOAT_CHUNK):
        k = min(FLOAT_CHUNK, p.k - start)
        for tile in range(first, last, FLOAT_TILES):
            tiles = min(FLOAT_TILES, last - tile)
            for t in range(tiles):
                _float_widen(p, layout, tile + t, start, k, scratch, scratch_at + t * k * 4 * ROWS)
            for column in range(0, p.columns, p.lanes):
                end = min(column + p.lanes, p.columns)
                if tiles == FLOAT_TILES:
                    _float_wide_run(p, TWO, column, end, tile, start, k, scratch, scratch_at)
                else:
                    _float_wide_run(p, ONE, column, end, tile, start, k, scratch, scratch_at)

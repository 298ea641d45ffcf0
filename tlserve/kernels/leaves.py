"""The innermost kernels of matrix products, each compiled on its own and called through its address.

There is one for each layout and number of columns, so a model compiles only those of its own formats, and the programs
that use them none. All take int64 numbers; addresses and steps count bytes.
"""

# Numba types kernels; mypy sees their scalars as Any.
# mypy: disable-error-code="no-any-return, return-value, operator"
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from tlserve.kernels.emit import Static, c_call
from tlserve.kernels.jit import TARGET, Leaf, inline
from tlserve.kernels.layout import BY_CODE, ROWS, Layout
from tlserve.kernels.simd import prefetch
from tlserve.kernels.tile import (
    add_columns,
    add_group,
    add_product,
    load_columns,
    load_scale,
    load_second,
    load_values,
    repeat_rows,
    store_columns,
    zero_columns,
)

# How the sums of a leaf begin.
REPLACE, ACCUMULATE, RESUME = range(3)  # with the bias; with the bias plus y; with y as an earlier call left it

WIDTHS = (1, 2, 4, 8)

MAX_LANES = 8 if TARGET.isa == "avx512" else 4  # columns whose sums and dots fit the registers
_SUMS = 16 if TARGET.isa == "avx512" else 4
_ONE = Static(1)
_TILES_ARGUMENTS = 14


@inline
def _start(tiles: Any, width: Any, mode: int, bias: int, y: int, y_step: int, rows: np.int32) -> Any:
    if mode == RESUME:
        return load_columns(tiles, width, y, 0, y_step, rows)
    columns = zero_columns(tiles, width)
    if bias != 0:
        columns = repeat_rows(tiles, width, bias, 0, rows)
    if mode == ACCUMULATE:
        columns = add_columns(columns, load_columns(tiles, width, y, 0, y_step, rows))
    return columns


def _quantised_tiles(layout: Layout, width: int) -> Callable[..., None]:
    """The leaf for a few row tiles of a quantised layout and ``width`` columns.

    For the tiles [fetch, fetch_end) also those weights are fetched that lie ``ahead`` bytes behind and will be needed
    before long.
    """
    static: Any = Static(layout)
    columns_static = Static(width)

    def tiles(
        weights: int, tile_step: int, blocks: int, act: int, act_step: int,
        y: int, y_step: int, rows: int, bias: int, mode: int, tiles: int, ahead: int, fetch: int, fetch_end: int,
    ) -> None:  # fmt: skip
        for tile in range(tiles):
            is_fetching = fetch <= tile < fetch_end
            columns = _start(_ONE, columns_static, mode, bias, y, y_step, np.int32(rows))
            at, record = weights, act
            for _ in range(blocks):
                header = at
                at += static.header_bytes
                for _ in range(static.block_groups):
                    if is_fetching:
                        for line in range(0, static.group_bytes, 64):
                            prefetch(at, ahead + line)
                    values = load_values(static, at, 0)
                    scale = load_scale(static, header, 0, at, 0)
                    second = load_second(static, header, 0, at, 0)
                    columns = add_group(static, columns, values, scale, second, record, 0)
                    at += static.group_bytes
                    record += act_step
            store_columns(_ONE, columns_static, columns, y, 0, y_step, np.int32(rows))
            weights += tile_step
            y += 4 * ROWS
            rows -= ROWS
            if bias != 0:
                bias += 4 * ROWS

    return tiles


def _float_tiles(layout: Layout, width: int) -> Callable[..., None]:
    """The same for a float layout; ``blocks`` counts k."""
    static: Any = Static(layout)
    columns_static = Static(width)
    # As many tiles at once as there are registers for sums, so that many sums wait for their fma at the same time.
    few = max(1, min(4, _SUMS // width))
    few_static = Static(few)

    def tiles(
        weights: int, tile_step: int, blocks: int, act: int, act_step: int,
        y: int, y_step: int, rows: int, bias: int, mode: int, tiles: int, ahead: int, fetch: int, fetch_end: int,
    ) -> None:  # fmt: skip
        while tiles > 0:
            at, x = weights, act
            if tiles >= few:
                columns = _start(few_static, columns_static, mode, bias, y, y_step, np.int32(rows))
                for _ in range(blocks):
                    columns = add_product(static, columns_static, columns, at, 0, tile_step, x, 0)
                    at += static.k_bytes
                    x += act_step
                store_columns(few_static, columns_static, columns, y, 0, y_step, np.int32(rows))
                done = few
            else:
                column = _start(_ONE, columns_static, mode, bias, y, y_step, np.int32(rows))
                for _ in range(blocks):
                    column = add_product(static, columns_static, column, at, 0, tile_step, x, 0)
                    at += static.k_bytes
                    x += act_step
                store_columns(_ONE, columns_static, column, y, 0, y_step, np.int32(rows))
                done = 1
            weights += done * tile_step
            y += done * 4 * ROWS
            rows -= done * ROWS
            tiles -= done
            if bias != 0:
                bias += done * 4 * ROWS

    return tiles


call_tiles = c_call(_TILES_ARGUMENTS)


@cache
def _tiles_leaf(layout: Layout, width: int) -> Leaf:
    make = _quantised_tiles if layout.is_quantised else _float_tiles
    name = f"tiles-{layout.name}-{width}".replace(" ", "-")
    return Leaf(name, make(layout, width), types.void(*[types.int64] * _TILES_ARGUMENTS))


def _widths(code: int) -> list[Leaf]:
    return [_tiles_leaf(BY_CODE[code], width) for width in WIDTHS if width <= MAX_LANES]


def leaves(codes: Iterable[int]) -> list[Leaf]:
    """The kernels that products with weights of these layouts need, for ``jit.compile_all``."""
    return [leaf for code in sorted(set(codes)) for leaf in _widths(code)]


def addresses(codes: Iterable[int]) -> NDArray[np.int64]:
    """Their addresses, compiling those that are not yet: the ``kernels`` of every Product.

    [layouts, widths]: kernels[code, i] is for WIDTHS[i] columns.
    """
    table = np.zeros((len(BY_CODE), len(WIDTHS)), np.int64)
    for code in codes:
        for i, leaf in enumerate(_widths(code)):
            table[code, i] = leaf.address
    return table

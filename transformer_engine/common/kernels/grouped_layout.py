"""Where consecutive groups of rows lie, as an int32 tensor on the device, so that no size travels to the host.

The layout: the first row of every group and the end of the last, its first tile of 128 rows and their end, and the
group of every tile.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

TILE_ROWS = 128
ROWS = tl.constexpr(TILE_ROWS)


def layout_size(total: int, groups: int) -> int:
    """Integers in the layout of groups that have total rows: two tables of groups + 1, and the tiles at most."""
    return 2 * (groups + 1) + tiles_at_most(total, groups)


def tiles_at_most(total: int, groups: int) -> int:
    """Tiles of 128 rows that groups with total rows can need: each group leaves at most one partly filled."""
    return total // TILE_ROWS + groups


@triton.jit
def layout_kernel(
    splits, layout, TOTAL, TILES, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """layout of splits [GROUPS], rows a group; WIDTH is a power of two above GROUPS. Rows past TOTAL are cut off."""
    e = tl.arange(0, WIDTH)
    rows = tl.load(splits + e, mask=e < GROUPS, other=0).to(tl.int32)
    ends = tl.minimum(tl.cumsum(tl.maximum(rows, 0), 0), TOTAL)
    rows = ends - tl.minimum(tl.cumsum(tl.maximum(rows, 0), 0) - tl.maximum(rows, 0), TOTAL)
    tile_ends = tl.cumsum((rows + ROWS - 1) // ROWS, 0)
    if tl.program_id(0) == 0:
        tl.store(layout, 0)
        tl.store(layout + GROUPS + 1, 0)
        tl.store(layout + 1 + e, ends, mask=e < GROUPS)
        tl.store(layout + GROUPS + 2 + e, tile_ends, mask=e < GROUPS)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    finished = (tile_ends[None, :] <= t[:, None]) & (e < GROUPS)[None, :]
    tl.store(layout + 2 * (GROUPS + 1) + t, tl.sum(finished.to(tl.int32), 1), mask=t < TILES)


@triton.jit
def group_of_tile(layout, tile_m, GROUPS: tl.constexpr):
    """The group of a tile; GROUPS for a tile that does not exist."""
    return tl.load(layout + 2 * (GROUPS + 1) + tile_m)


@triton.jit
def group_or_none(layout, tile_m, TILES, GROUPS: tl.constexpr):
    """The group of one of TILES tiles, of which the last is behind all groups whatever their sizes: GROUPS there.

    One tile more than `tiles_at_most` is enough for every row to have one: with S of T rows in groups, at most
    (S + 127 GROUPS) / 128 tiles are theirs, so that T // 128 + GROUPS + 1 leave (T - S) / 128 or more.
    """
    return tl.load(layout + 2 * (GROUPS + 1) + tile_m, mask=tile_m < TILES - 1, other=GROUPS)


@triton.jit
def row_behind(layout, tile_m, GROUPS: tl.constexpr):
    """The first row of a tile that is no group's: they follow the last row that is one's."""
    return tl.load(layout + GROUPS) + (tile_m - tl.load(layout + 2 * GROUPS + 1)) * ROWS


@triton.jit
def rows_of_group(layout, group, GROUPS: tl.constexpr):
    """(first row, rows, first tile, tiles) of a group."""
    start = tl.load(layout + group)
    rows = tl.load(layout + group + 1) - start
    first_tile = tl.load(layout + GROUPS + 1 + group)
    return start, rows, first_tile, tl.load(layout + GROUPS + 2 + group) - first_tile


@functools.lru_cache(maxsize=256)
def layout_of(total: int, groups: int) -> Launch:
    """Input: splits [groups] of any integer type; output: layout int32 [layout_size]."""
    tiles = tiles_at_most(total, groups)
    width = triton.next_power_of_2(groups)
    block = max(1, min(128, 8192 // width))
    outputs = (Output((layout_size(total, groups),), "int32"),)
    grid = (ceil_div(tiles, block), 1, 1)
    return Launch(layout_kernel, grid, outputs, (total, tiles), (groups, width, block), warps=4)

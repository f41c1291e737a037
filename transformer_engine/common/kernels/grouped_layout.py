"""Positions of consecutive row groups as an int32 tensor on the device, without copying sizes to the host.

The layout contains every group's first row and the last group's end, every group's first 128-row tile and the last
group's end tile, and every tile's group.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

TILE_ROWS = 128
ROWS = tl.constexpr(TILE_ROWS)


def tiles_at_most(total: int, groups: int) -> int:
    """Maximum number of 128-row tiles: each group has at most one partly filled tile."""
    return total // TILE_ROWS + groups


@triton.jit
def layout_kernel(
    splits, layout, TOTAL, TILES, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the layout for splits [GROUPS], rows per group, up to TOTAL; WIDTH is a power of two above GROUPS."""
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
    """Group of a tile; GROUPS for a tile that does not exist."""
    return tl.load(layout + 2 * (GROUPS + 1) + tile_m)


@triton.jit
def group_or_none(layout, tile_m, TILES, GROUPS: tl.constexpr):
    """Group for one of TILES tiles; the last tile is after all groups for any sizes, and returns GROUPS.

    One tile more than `tiles_at_most` suffices for every row to be in a tile: if S of T rows are in groups, the groups
    need at most (S + 127 GROUPS) / 128 tiles, so that T // 128 + GROUPS + 1 leave (T - S) / 128 or more.
    """
    return tl.load(layout + 2 * (GROUPS + 1) + tile_m, mask=tile_m < TILES - 1, other=GROUPS)


@triton.jit
def first_padding_row(layout, tile_m, GROUPS: tl.constexpr):
    """First row of a tile after all groups; such tiles begin after the last group's last row."""
    return tl.load(layout + GROUPS) + (tile_m - tl.load(layout + 2 * GROUPS + 1)) * ROWS


@triton.jit
def rows_of_group(layout, group, GROUPS: tl.constexpr):
    """Get (first row, rows, first tile, tiles) for a group."""
    start = tl.load(layout + group)
    rows = tl.load(layout + group + 1) - start
    first_tile = tl.load(layout + GROUPS + 1 + group)
    return start, rows, first_tile, tl.load(layout + GROUPS + 2 + group) - first_tile


@functools.lru_cache(maxsize=256)
def group_layout(total: int, groups: int) -> Launch:
    """Launch (splits [groups] with any integer type) -> layout int32 [layout_size]."""
    tiles = tiles_at_most(total, groups)
    width = triton.next_power_of_2(groups)
    block = max(1, min(128, 8192 // width))
    outputs = (Output((2 * (groups + 1) + tiles_at_most(total, groups),), "int32"),)
    grid = (ceil_div(tiles, block), 1, 1)
    return Launch(layout_kernel, grid, outputs, (total, tiles), (groups, width, block), warps=4)

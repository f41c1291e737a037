"""Matrices [R, K] cut into tiles of (r, c) elements: [ceil(R/r), r, ceil(K/c), c], padded with zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import ceil_div, round_up


def cut(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """[R, K] -> float32 [ceil(R/r), r, ceil(K/c), c]; zeros fill the last tiles."""
    x = x.to(torch.float32)
    rows, depth = x.shape
    r, c = tile
    padded_rows, padded_depth = round_up(rows, r), round_up(depth, c)
    if (padded_rows, padded_depth) != (rows, depth):
        x = torch.nn.functional.pad(x, (0, padded_depth - depth, 0, padded_rows - rows))
    return x.reshape(padded_rows // r, r, padded_depth // c, c)


def join(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    """[ceil(R/r), r, ceil(K/c), c] -> [R, K] contiguous, the padding cut off.

    Join codes, not the values they come from: Inductor's C++ (torch 2.13) narrows the last elements of a ragged
    row wrongly where their scale is one of a tile.
    """
    rows, depth = shape
    tile_rows, r, tile_columns, c = tiles.shape
    return tiles.reshape(tile_rows * r, tile_columns * c)[:rows, :depth].contiguous()


def tile_amax(tiles: Tensor) -> Tensor:
    """max|x| of every tile, float32 [ceil(R/r), ceil(K/c)]; NaN where a tile holds one."""
    amax = tiles.abs().amax(dim=-1)
    # The width first: both axes in one call take 1.5 times as long on a CPU.
    return amax.squeeze(1) if amax.shape[1] == 1 else amax.amax(dim=1)


def spread(values: Tensor) -> Tensor:
    """One value a tile [ceil(R/r), ceil(K/c)] -> [ceil(R/r), 1, ceil(K/c), 1], to multiply tiles by."""
    return values[:, None, :, None]


def repeat_rows(values: Tensor, rows_a_tile: int, rows: int) -> Tensor:
    """[ceil(R/r), n] -> [R, n]: each row of tiles' values for every row that it covers."""
    tile_rows, columns = ceil_div(rows, rows_a_tile), values.shape[1]
    wide = values[:, None, :].expand(tile_rows, rows_a_tile, columns)
    return wide.reshape(tile_rows * rows_a_tile, columns)[:rows].contiguous()

"""Matrices [R, K] as tiles of r x c elements, [ceil(R/r), r, ceil(K/c), c], for the block-scaled reference formats."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import round_up


def cut(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Split [R, K] into float32 tiles [ceil(R/r), r, ceil(K/c), c]; the last tiles are padded with zeros."""
    x = x.to(torch.float32)
    rows, depth = x.shape
    r, c = tile
    padded_rows, padded_depth = round_up(rows, r), round_up(depth, c)
    if (padded_rows, padded_depth) != (rows, depth):
        x = torch.nn.functional.pad(x, (0, padded_depth - depth, 0, padded_rows - rows))
    return x.reshape(padded_rows // r, r, padded_depth // c, c)


def join(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    """Join [ceil(R/r), r, ceil(K/c), c] to [R, K] contiguous, without the padding."""
    rows, depth = shape
    tile_rows, r, tile_columns, c = tiles.shape
    if (tile_rows * r, tile_columns * c) == (rows, depth):
        return tiles.reshape(rows, depth)
    if torch.compiler.is_compiling() and tiles.device.type == "cpu":
        return _join_alone(tiles, rows, depth)
    return _join_ragged(tiles, rows, depth)


def _join_ragged(tiles: Tensor, rows: int, depth: int) -> Tensor:
    tile_rows, r, tile_columns, c = tiles.shape
    matrix = tiles.reshape(tile_rows * r, tile_columns * c)[:rows, :depth]
    return matrix.clone(memory_format=torch.contiguous_format)


# An operator that Inductor cannot fuse: its C++ loops (torch 2.13) turn an index k // c into two
# nested loops with K // c and c turns, which leaves the last K % c elements of a row unwritten.
_join_alone = torch.library.custom_op(
    "transformer_engine::join_tiles",
    _join_ragged,
    mutates_args=(),
    schema="(Tensor tiles, SymInt rows, SymInt depth) -> Tensor",
)


@_join_alone.register_fake
def _join_alone_shape(tiles: Tensor, rows: int, depth: int) -> Tensor:
    return tiles.new_empty((rows, depth))


def tile_amax(tiles: Tensor) -> Tensor:
    """Return max|x| per tile, float32 [ceil(R/r), ceil(K/c)]; NaN for a tile with a NaN."""
    amax = tiles.abs().amax(dim=-1)
    # The width first: both axes in one call take 1.5 times as long on a CPU.
    return amax.squeeze(1) if amax.shape[1] == 1 else amax.amax(dim=1)


def spread(values: Tensor) -> Tensor:
    """Reshape one value per tile [ceil(R/r), ceil(K/c)] to [ceil(R/r), 1, ceil(K/c), 1], to multiply tiles by it."""
    return values[:, None, :, None]


def repeat_rows(values: Tensor, rows_per_tile: int, rows: int) -> Tensor:
    """Repeat each row of values [ceil(R/r), n] for the r matrix rows of its tiles: [R, n]."""
    tile_rows, columns = values.shape
    return join(spread(values).expand(tile_rows, rows_per_tile, columns, 1), (rows, columns))

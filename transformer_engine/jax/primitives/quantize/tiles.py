"""Matrices [R, K] as (r, c) element tiles, [ceil(R/r), r, ceil(K/c), c], padded with zeros; tile scales.

R and K may be several axes each, [*R, *K] with K from `axis` on. The last axis of each is split into tiles, so that any
axis may be sharded.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import ceil_div, round_up
from ....common.quantize_spec import QuantizeSpec
from .. import exact
from ..operand import matrix_shape

Scales = TypeVar("Scales", Array, tuple[Array, Array])


def split_axes(
    shape: tuple[int, ...], axis: int, tile: tuple[int, int]
) -> tuple[tuple[int, ...], int]:
    """Axes [*R, *K] that are split into tiles, and where K begins.

    One side's axes are merged if a tile would cover elements from two axes.
    """
    sides = shape[:axis], shape[axis:]
    rows, columns = (
        side if side[-1] % size == 0 else (prod(side),)
        for side, size in zip(sides, tile, strict=True)
    )
    return (*rows, *columns), len(rows)


def counts(shape: tuple[int, ...], axis: int, tile: tuple[int, int]) -> tuple[int, ...]:
    """Number of tiles along each axis."""
    rows, columns = shape[:axis], shape[axis:]
    return (*rows[:-1], ceil_div(rows[-1], tile[0]), *columns[:-1], ceil_div(columns[-1], tile[1]))


def cut(x: Array, tile: tuple[int, int], axis: int = 1) -> Array:
    """Split [*R, *K] into tiles [.., ceil(R/r), r, .., ceil(K/c), c]; zeros fill the last tiles."""
    widths = [0] * x.ndim
    for dimension, size in ((axis - 1, tile[0]), (x.ndim - 1, tile[1])):
        widths[dimension] = round_up(x.shape[dimension], size) - x.shape[dimension]
    if any(widths):
        x = jnp.pad(x, [(0, width) for width in widths])
    tiles = counts(x.shape, axis, tile)
    return x.reshape(*tiles[:axis], tile[0], *tiles[axis:], tile[1])


def join(tiles: Array, shape: tuple[int, ...], axis: int = 1) -> Array:
    """Join tiles [.., ceil(R/r), r, .., ceil(K/c), c] to [*R, *K] without the padding."""
    rows, columns = tiles.shape[: axis + 1], tiles.shape[axis + 1 :]
    merged = [(*side[:-2], side[-2] * side[-1]) for side in (rows, columns)]
    return tiles.reshape(*merged[0], *merged[1])[tuple(slice(size) for size in shape)]


def tile_amax(tiles: Array, axis: int = 1) -> Array:
    """Compute max|x| per tile, float32 [.., ceil(R/r), .., ceil(K/c)]; NaN where a tile has one."""
    bits = jnp.max(exact.magnitude_bits(tiles), axis=(axis, tiles.ndim - 1), initial=0)
    return exact.bits_to_float(bits)


def spread(values: Array, axis: int = 1) -> Array:
    """Expand one value per tile to [.., ceil(R/r), 1, .., ceil(K/c), 1], to multiply tiles by it."""
    return jnp.expand_dims(values, (axis, values.ndim + 1))


def matrix_of_scales(
    scale: Array | None, spec: QuantizeSpec, shape: tuple[int, ...], axis: int
) -> Array | None:
    """Arrange the scales for an array [*R, *K] with this shape as a matrix, as in `Operand`; None without scales.

    The 2-D variant of a format whose scales belong to rows repeats a tile's scale for each row.
    """
    if scale is None:
        return None
    if spec.two_dimensional and spec.tile is not None:
        repeated = jnp.repeat(scale, spec.tile[0], axis=axis - 1)
        scale = lax.slice_in_dim(repeated, 0, shape[axis - 1], axis=axis - 1)
    return scale.reshape(matrix_shape(scale.shape, axis))


def materialize_scales(scales: Scales) -> Scales:
    """Keep scales computed once: XLA would recompute them for every element that they multiply."""
    return lax.platform_dependent(scales, cpu=_sort_into_place, default=lax.optimization_barrier)


def _sort_into_place(scales: Scales) -> Scales:
    """Pass per-tensor scales through a sort by their indices, which XLA does not fuse; others through a barrier.

    XLA removes the barrier before it fuses for a CPU: a step of a small model under current scaling took 0.12 s with
    the barrier, 0.03 s with the sort (0.03 s in float32).
    """
    return jax.tree.map(_sort_scales, scales)


def _sort_scales(scale: Array) -> Array:
    if scale.size != 1 or scale.dtype != jnp.float32:
        return lax.optimization_barrier(scale)
    indices = lax.iota(jnp.int32, 2)  # two copies: XLA removes a one-element sort
    _, bits = lax.sort((indices, jnp.tile(exact.float_bits(scale.reshape(1)), 2)), num_keys=1)
    return exact.bits_to_float(bits[:1]).reshape(scale.shape)

"""Matrices [R, K] cut into tiles of (r, c) elements: [ceil(R/r), r, ceil(K/c), c], padded with zeros.

R and K may be several axes each, [*R, *K] with K from `axis` on, of which the last ones are cut: devices may hold parts
of any of them.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.formats import ceil_div, round_up
from .. import exact

Scales = TypeVar("Scales", Array, tuple[Array, Array])


def cut_apart(shape: tuple[int, ...], axis: int, tile: tuple[int, int]) -> tuple[tuple[int, ...], int]:
    """(the axes [*R, *K] that tiles are cut from, where K begins): several are one where tiles would lie on two."""
    sides = shape[:axis], shape[axis:]
    rows, columns = (
        side if side[-1] % size == 0 else (prod(side),) for side, size in zip(sides, tile, strict=True)
    )
    return (*rows, *columns), len(rows)


def counts(shape: tuple[int, ...], axis: int, tile: tuple[int, int]) -> tuple[int, ...]:
    """How many tiles lie along each axis."""
    rows, columns = shape[:axis], shape[axis:]
    return (*rows[:-1], ceil_div(rows[-1], tile[0]), *columns[:-1], ceil_div(columns[-1], tile[1]))


def cut(x: Array, tile: tuple[int, int], axis: int = 1) -> Array:
    """[*R, *K] -> [.., ceil(R/r), r, .., ceil(K/c), c] of the same dtype; zeros fill the last tiles."""
    widths = [0] * x.ndim
    for place, size in ((axis - 1, tile[0]), (x.ndim - 1, tile[1])):
        widths[place] = round_up(x.shape[place], size) - x.shape[place]
    if any(widths):
        x = jnp.pad(x, [(0, width) for width in widths])
    tiles = counts(x.shape, axis, tile)
    return x.reshape(*tiles[:axis], tile[0], *tiles[axis:], tile[1])


def join(tiles: Array, shape: tuple[int, ...], axis: int = 1) -> Array:
    """[.., ceil(R/r), r, .., ceil(K/c), c] -> [*R, *K], the padding cut off."""
    rows, columns = tiles.shape[: axis + 1], tiles.shape[axis + 1 :]
    merged = [(*side[:-2], side[-2] * side[-1]) for side in (rows, columns)]
    return tiles.reshape(*merged[0], *merged[1])[tuple(slice(size) for size in shape)]


def tile_amax(tiles: Array, axis: int = 1) -> Array:
    """max|x| of every tile, float32 [.., ceil(R/r), .., ceil(K/c)]; NaN where a tile holds one."""
    bits = jnp.max(exact.magnitude_bits(tiles), axis=(axis, tiles.ndim - 1), initial=0)
    return exact.float_of(bits)


def spread(values: Array, axis: int = 1) -> Array:
    """One value a tile [.., ceil(R/r), .., ceil(K/c)] -> [.., ceil(R/r), 1, .., ceil(K/c), 1], to multiply tiles by."""
    return jnp.expand_dims(values, (axis, values.ndim + 1))


def repeat_rows(values: Array, rows_a_tile: int, rows: int, axis: int = 1) -> Array:
    """[.., ceil(R/r), *n] -> [.., R, *n]: each row of tiles' values for every row that it covers."""
    repeated = jnp.repeat(values, rows_a_tile, axis=axis - 1)
    return lax.slice_in_dim(repeated, 0, rows, axis=axis - 1)


def settled(scales: Scales) -> Scales:
    """The scales, computed once: XLA would compute them anew for every element that they multiply."""
    return lax.platform_dependent(scales, cpu=_sorted_into_place, default=lax.optimization_barrier)


def _sorted_into_place(scales: Scales) -> Scales:
    """Scales of whole tensors through a sort by their places, which XLA fuses with nothing; tables behind a barrier.

    The barrier is gone when XLA fuses for a CPU: a step of a small model under current scaling took 0.12 s with it,
    0.03 s with the sort (0.03 s in float32).
    """
    return jax.tree.map(lambda s: _sorted(s) if _is_number(s) else lax.optimization_barrier(s), scales)


def _is_number(scale: Array) -> bool:
    return scale.size == 1 and scale.dtype == jnp.float32


def _sorted(scale: Array) -> Array:
    places = lax.iota(jnp.int32, 2)  # of two copies: a sort of one element is no operation
    _, bits = lax.sort((places, jnp.tile(exact.bits_of(scale.reshape(1)), 2)), num_keys=1)
    return exact.float_of(bits[:1]).reshape(scale.shape)

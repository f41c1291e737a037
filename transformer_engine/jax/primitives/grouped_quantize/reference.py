"""Codes of a stack, and of rows in groups, in plain jnp operations, for any extents."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import Element
from .. import exact
from ..quantize import cast, given_multiplier, scale_from_amax
from ..quantize.tiles import settled
from .request import RowCodes, RowsRequest, StackCodes, StackRequest


def group_of_rows(group_sizes: Array, rows: int) -> Array:
    """int32 [rows]: the group of every row, G for those behind the last group."""
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    # Not by a search in steps, each of which is a kernel on a GPU.
    places = jnp.arange(rows, dtype=jnp.int32)
    return jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)


def of_rows(values: Array, group_sizes: Array, rows: int) -> Array:
    """values [G] -> [rows]: each row's own; 1 behind the last group."""
    return jnp.append(values, jnp.ones(1, values.dtype))[group_of_rows(group_sizes, rows)]


def run(x: Array, multiplier: Array, element: Element, directions: tuple[bool, bool]) -> StackCodes:
    """See `quantize_stack`."""
    multiplier = given_multiplier(multiplier)
    codes = cast(x.astype(jnp.float32) * multiplier[:, None, None], element)
    amax = exact.float_of(exact.magnitude_bits(x).max(axis=(1, 2), initial=0))
    rowwise, columnwise = directions
    return StackCodes(
        codes if rowwise else None,
        jnp.swapaxes(codes, 1, 2) if columnwise else None,
        settled(exact.reciprocal(multiplier)),
        amax,
    )


BACKEND = Backend[StackRequest]("reference", bind=lambda request: run)


def run_rows(
    x: Array, group_sizes: Array, multiplier: Array | None, element: Element, scaling: tuple[bool, float],
    over: tuple[str, ...],
) -> RowCodes:  # fmt: skip
    """See `quantize_rows`."""
    of_row = exact.magnitude_bits(x).max(axis=1, initial=0)
    belongs = group_of_rows(group_sizes, x.shape[0])[None] == jnp.arange(group_sizes.shape[0])[:, None]
    # Once: fused into what reads it, one thread would look at all rows (H200, 16384 of them: 0.44 ms a reader).
    amax = settled(exact.float_of(jnp.where(belongs, of_row[None], 0).max(axis=1, initial=0)))
    if multiplier is None:
        amax = exact.largest_over(amax, over)
        power_of_two, epsilon = scaling
        options = {"power_of_two": power_of_two, "epsilon": epsilon}
        multiplier = settled(scale_from_amax(settled(amax), element.maximum, **options))
    multiplier = given_multiplier(multiplier)
    factors = of_rows(multiplier, group_sizes, x.shape[0])[:, None]
    codes = cast(x.astype(jnp.float32) * factors, element)
    return RowCodes(codes, exact.reciprocal(multiplier), amax)


ROWS = Backend[RowsRequest]("reference", bind=lambda request: run_rows)

"""Requests and results for quantizing a matrix stack or grouped rows; reference in plain jnp operations."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ....common.formats import Element
from .. import exact
from ..quantize import cast, nonzero_multiplier, scale_from_amax
from ..quantize.tiles import materialize_scales


class StackRequest(NamedTuple):
    """Properties of x [groups, rows, columns] that determine the backend."""

    groups: int
    rows: int
    columns: int
    dtype: jnp.dtype
    platform: str


class StackCodes(NamedTuple):
    """Codes for a matrix stack.

    Attributes:
        codes: Codes [G, R, C], None if not requested.
        codes_t: Transposed codes [G, C, R], None if not requested.
        scale: Inverse multipliers, float32 [G].
        amax: Per-matrix absolute maxima, float32 [G].
    """

    codes: Array | None
    codes_t: Array | None
    scale: Array
    amax: Array


class RowsRequest(NamedTuple):
    """Properties of x [rows, columns], whose rows are in groups, that determine the backend."""

    groups: int
    rows: int
    columns: int
    dtype: jnp.dtype
    platform: str


class RowCodes(NamedTuple):
    """Codes [M, K] for grouped rows; scale and amax as in `StackCodes`."""

    codes: Array
    scale: Array
    amax: Array


def group_of_rows(group_sizes: Array, rows: int) -> Array:
    """Group index for every row, int32 [rows]; G for rows after the last group."""
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    # A binary search would be a kernel per step on a GPU.
    places = jnp.arange(rows, dtype=jnp.int32)
    return jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)


def of_rows(values: Array, group_sizes: Array, rows: int) -> Array:
    """Expand per-group values [G] to rows [rows]; 1 after the last group."""
    return jnp.append(values, jnp.ones(1, values.dtype))[group_of_rows(group_sizes, rows)]


# The references are compiled as one program also in eager mode, where they would take seconds operation by operation.
@functools.partial(jax.jit, static_argnames=("element", "directions"))
def run(x: Array, multiplier: Array, element: Element, directions: tuple[bool, bool]) -> StackCodes:
    """See `quantize_stack`."""
    multiplier = nonzero_multiplier(multiplier)
    codes = cast(x.astype(jnp.float32) * multiplier[:, None, None], element)
    amax = exact.bits_to_float(exact.magnitude_bits(x).max(axis=(1, 2), initial=0))
    rowwise, columnwise = directions
    return StackCodes(
        codes if rowwise else None,
        jnp.swapaxes(codes, 1, 2) if columnwise else None,
        materialize_scales(exact.reciprocal(multiplier)),
        amax,
    )


BACKEND = Backend[StackRequest]("reference", bind=lambda request: run)


@functools.partial(jax.jit, static_argnames=("element", "scaling", "mesh_axes"))
def run_rows(
    x: Array,
    group_sizes: Array,
    multiplier: Array | None,
    element: Element,
    scaling: tuple[bool, float],
    mesh_axes: tuple[str, ...],
) -> RowCodes:
    """See `quantize_rows`."""
    of_row = exact.magnitude_bits(x).max(axis=1, initial=0)
    belongs = (
        group_of_rows(group_sizes, x.shape[0])[None] == jnp.arange(group_sizes.shape[0])[:, None]
    )
    # Computed once: fused into its readers, one thread would read all rows (H200, 16384 rows: 0.44 ms per reader).
    amax = materialize_scales(
        exact.bits_to_float(jnp.where(belongs, of_row[None], 0).max(axis=1, initial=0))
    )
    if multiplier is None:
        amax = exact.maximum_over_axes(amax, mesh_axes)
        power_of_two, epsilon = scaling
        options = {"power_of_two": power_of_two, "epsilon": epsilon}
        multiplier = materialize_scales(
            scale_from_amax(materialize_scales(amax), element.maximum, **options)
        )
    multiplier = nonzero_multiplier(multiplier)
    factors = of_rows(multiplier, group_sizes, x.shape[0])[:, None]
    codes = cast(x.astype(jnp.float32) * factors, element)
    return RowCodes(codes, exact.reciprocal(multiplier), amax)


ROWS = Backend[RowsRequest]("reference", bind=lambda request: run_rows)

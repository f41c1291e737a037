"""What backends judge of a stack, or of rows in groups, that are quantized, and what they make of them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class StackRequest(NamedTuple):
    """Facts of x [groups, rows, columns]; never values."""

    groups: int
    rows: int
    columns: int
    dtype: jnp.dtype
    platform: str


class StackCodes(NamedTuple):
    """codes [G, R, C] and codes_t [G, C, R] of the directions that were asked for; float32 [G] of the rest.

    scale   the multipliers' inverses
    amax    every matrix's absolute maximum
    """

    codes: Array | None
    codes_t: Array | None
    scale: Array
    amax: Array


class RowsRequest(NamedTuple):
    """Facts of x [rows, columns], whose rows are in groups; never values."""

    groups: int
    rows: int
    columns: int
    dtype: jnp.dtype
    platform: str


class RowCodes(NamedTuple):
    """codes [M, K]; float32 [G] of the rest, as of `StackCodes`."""

    codes: Array
    scale: Array
    amax: Array

"""What backends judge of a stack that is quantized, and what they make of it."""

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

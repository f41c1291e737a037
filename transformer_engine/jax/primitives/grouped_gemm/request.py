"""What backends judge of a grouped product."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

# What the codes of both operands are multiplied by, a group; None where they are values.
Scales = tuple[Array, Array] | None


class GroupedGemmRequest(NamedTuple):
    """Facts of out [M, N] = rows of group g of a [M, K] @ b [G, K, N], or of the contraction of rows; never values.

    dtype            of the operands; result: of what is made
    features_first   b is [G, N, K]
    scaled           operands are FP8 codes with one scale a group
    """

    groups: int
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    result: jnp.dtype
    contracts_rows: bool
    features_first: bool
    scaled: bool
    platform: str

"""What backends judge of a grouped product."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class GroupedGemmRequest(NamedTuple):
    """Facts of out [M, N] = rows of group g of a [M, K] @ b [G, K, N], or of the contraction of rows; never values."""

    groups: int
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    contracts_rows: bool

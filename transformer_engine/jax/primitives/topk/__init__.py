"""(values, places) of the k greatest elements of every row, in no promised order."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.checks import whole
from ...checks import check_array


def topk(x: Array, k_value: int) -> tuple[Array, Array]:
    """values [.., k] and int32 places [.., k] of x [b, n] or [n]."""
    check_array("x", x)
    whole("k_value", k_value)
    if x.ndim not in (1, 2) or k_value > x.shape[-1]:
        raise ValueError(f"k_value={k_value} of x {x.shape}; give [n] or [b, n] and at most n")
    values, places = lax.top_k(x, k_value)
    return values, places.astype(jnp.int32)

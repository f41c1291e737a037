"""The k largest elements per row."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ...common.checks import whole
from ..runtime.checks import check_array

__all__ = ["topk"]


def topk(x: Array, k_value: int) -> tuple[Array, Array]:
    """Find the k largest elements of each row and their indices.

    Args:
        x: Values [b, n] or [n].
        k_value: Number of elements k.

    Returns:
        Values [.., k] and indices int32 [.., k].

    Raises:
        TypeError: x is not an array, or k_value is not an integer.
        ValueError: x has other than one or two axes, or k_value is above n.
    """
    check_array("x", x)
    whole("k_value", k_value)
    if x.ndim not in (1, 2) or k_value > x.shape[-1]:
        raise ValueError(f"k_value={k_value} of x {x.shape}; give [n] or [b, n] and at most n")
    values, indices = lax.top_k(x, k_value)
    return values, indices.astype(jnp.int32)

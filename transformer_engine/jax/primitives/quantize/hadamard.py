"""y = (x * signs) @ H / 4 on 16-element groups, with the 16 x 16 Hadamard matrix H from Sylvester's construction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_transform(x: Array, random_sign: bool = True) -> Array:
    """Transform every 16 elements along the last axis of x [..., 16 n] in float32, rounded to x's dtype.

    Four rounds of sums and differences instead of a product: the addition order, and therefore the bits, are the same
    on every device.
    """
    groups = _groups(x)
    if random_sign:
        groups = groups * _signs(groups.ndim)
    return _round_values((_butterflies(groups) * 0.25).reshape(x.shape), x.dtype)


def inverse_transform(y: Array, random_sign: bool = True) -> Array:
    """Compute x from y = hadamard_transform(x): H / 4 is its own inverse, the signs follow it."""
    groups = _butterflies(_groups(y)) * 0.25
    if random_sign:
        groups = groups * _signs(groups.ndim)
    return _round_values(groups.reshape(y.shape), y.dtype)


def _round_values(values: Array, dtype: jnp.dtype) -> Array:
    """Round float32 values to dtype.

    XLA removes a conversion to bfloat16 and back on a GPU (`xla_allow_excess_precision`), but no `reduce_precision`.
    """
    if dtype == jnp.bfloat16:
        values = jax.lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(dtype)


def _signs(ndim: int) -> np.ndarray:
    """Signs as float32 [1, .., 1, 16] with ndim axes: jax_numpy_rank_promotion may be "raise"."""
    return np.asarray(SIGNS, np.float32).reshape((1,) * (ndim - 1) + (GROUP,))


def _groups(x: Array) -> Array:
    """Convert [.., 16 n] to float32 [.., n, 16]; the other axes stay separate, since they may be sharded."""
    depth = x.shape[-1]
    if depth % GROUP:
        raise ValueError(
            f"the Hadamard transform takes groups of {GROUP}, {depth} elements are not a multiple; pad them"
        )
    return x.astype(jnp.float32).reshape(*x.shape[:-1], depth // GROUP, GROUP)


def _butterflies(groups: Array) -> Array:
    shape = groups.shape
    for distance in (1, 2, 4, 8):
        pairs = groups.reshape(*shape[:-1], GROUP // (2 * distance), 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        groups = jnp.stack((first + second, first - second), axis=-2).reshape(shape)
    return groups

"""y [*batch, *features] + bias [*features], in y's dtype."""

from __future__ import annotations

from jax import Array, lax


def biased(y: Array, bias: Array | None) -> Array:
    """y as it is without a bias. Its axes are put in front by name: jax_numpy_rank_promotion may be "raise"."""
    if bias is None:
        return y
    return y + lax.expand_dims(bias.astype(y.dtype), range(y.ndim - bias.ndim))

"""The literal softmax in float32, which JAX differentiates."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from .request import SoftmaxRequest


def run(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """See `masked_softmax`."""
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    greatest = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        greatest = jnp.maximum(greatest, sink)
    # The shift leaves the result as it is and has no gradient; a row that sees nothing has no greatest score.
    greatest = lax.stop_gradient(jnp.where(jnp.isfinite(greatest), greatest, 0.0))
    weights = jnp.exp(scores - greatest)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - greatest)
    return weights / jnp.where(total == 0, 1.0, total)


BACKEND = Backend[SoftmaxRequest]("reference", bind=lambda request: run)

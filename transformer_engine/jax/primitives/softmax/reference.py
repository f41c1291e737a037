"""Softmax request, and its float32 reference, which JAX differentiates."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend


class SoftmaxRequest(NamedTuple):
    """Softmax properties that determine its backend.

    Attributes:
        shape: Score shape, [b, h, q, k].
        hidden: Whether a mask hides keys.
        sink: Whether the denominator has an additional score.
        platform: Platform of the program, "cpu" or "cuda".
    """

    shape: tuple[int, ...]
    hidden: bool
    sink: bool
    platform: str


def run(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """See `masked_softmax`."""
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    row_max = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        row_max = jnp.maximum(row_max, sink)
    # The shift does not change the result and has no gradient. A row without visible keys has no greatest score.
    row_max = lax.stop_gradient(jnp.where(jnp.isfinite(row_max), row_max, 0.0))
    weights = jnp.exp(scores - row_max)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - row_max)
    return weights / jnp.where(total == 0, 1.0, total)


BACKEND = Backend[SoftmaxRequest]("reference", bind=lambda request: run)

"""Masked softmax over attention scores; hidden keys have probabilities of exactly 0."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..platforms import bind_by_platform, differentiable_by_platform
from . import reference, triton
from .reference import SoftmaxRequest

__all__ = ["TABLE", "SoftmaxRequest", "masked_softmax"]

TABLE: Table[SoftmaxRequest] = Table("jax_softmax", (triton.BACKEND, reference.BACKEND))


def masked_softmax(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """Compute p = exp(s) / (sum of exp(s) over the visible keys + exp(sink)).

    Args:
        scores: Scores s, float32 [b, h, q, k].
        hidden: Mask that broadcasts to the shape of scores, True where a key is hidden; None hides no key.
        sink: Additional score in the denominator, float32 [1, h or 1, 1, 1]; None omits it.

    Returns:
        Probabilities, float32 [b, h, q, k]. A row without visible keys is 0.
    """
    masked, has_sink = hidden is not None, sink is not None
    calls = bind_by_platform(
        TABLE, lambda platform: SoftmaxRequest(scores.shape, masked, has_sink, platform)
    )
    return differentiable_by_platform(
        scores, hidden, sink, cuda=calls["cuda"], default=calls["cpu"]
    )

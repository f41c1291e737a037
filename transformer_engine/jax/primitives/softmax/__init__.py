"""Probabilities of scores [b, h, q, k], in which hidden keys are exactly zero."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..platforms import chosen, differentiable_by_platform
from . import reference, triton
from .request import SoftmaxRequest

__all__ = ["TABLE", "SoftmaxRequest", "masked_softmax"]

TABLE: Table[SoftmaxRequest] = Table("jax_softmax", (triton.BACKEND, reference.BACKEND))


def masked_softmax(scores: Array, hidden: Array | None, sink: Array | None) -> Array:
    """p = exp(s) / (sum over seen keys of exp(s) + exp(sink)), float32; a row that sees no key is zero.

    scores   float32 [b, h, q, k]
    hidden   True where a key is not seen, to be broadcast against scores
    sink     float32 [1, h or 1, 1, 1]: one more score, of no key; None: none
    """
    hides, sinks = hidden is not None, sink is not None
    calls = chosen(TABLE, lambda platform: SoftmaxRequest(scores.shape, hides, sinks, platform))
    return differentiable_by_platform(scores, hidden, sink, cuda=calls["cuda"], default=calls["cpu"])

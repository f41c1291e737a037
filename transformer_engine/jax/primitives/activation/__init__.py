"""y [..., F] = product over i of f_i(x [..., i, F]), and its gradient."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .reference import ACTIVATIONS, ActivationParams, ActivationRequest

__all__ = [
    "ACTIVATIONS",
    "TABLE",
    "ActivationParams",
    "ActivationRequest",
    "activation_backward",
    "activation_forward",
]

TABLE: Table[ActivationRequest] = Table("jax_activation", (triton.BACKEND, reference.BACKEND))


def activation_forward(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """Compute y [..., F] in x's dtype, with float32 arithmetic.

    Args:
        x: Values [..., n, F] for n names.
        names: An `ACTIVATIONS` entry.
        params: Constants for the clamped activation.
    """
    return compute(
        TABLE,
        lambda platform: ActivationRequest("forward", names, x.dtype, x.size, platform),
        x,
        names=names,
        params=params,
    )


def activation_backward(
    dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams
) -> Array:
    """Compute dx [..., n, F] in x's dtype, from dy [..., F] and the `activation_forward` arguments."""
    return compute(
        TABLE,
        lambda platform: ActivationRequest("backward", names, x.dtype, x.size, platform),
        dy,
        x,
        names=names,
        params=params,
    )

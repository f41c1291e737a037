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
    """Return y [..., F] in x's dtype, computed in float32.

    Args:
        x: Values [..., n, F], n the number of names.
        names: One of `ACTIVATIONS`.
        params: Constants of the clamped activation.
    """
    return compute(
        TABLE, lambda platform: ActivationRequest("forward", names, x.dtype, x.size, platform), x, names=names,
        params=params,
    )  # fmt: skip


def activation_backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """Return dx [..., n, F] in x's dtype, of dy [..., F] and the arguments of `activation_forward`."""
    return compute(
        TABLE, lambda platform: ActivationRequest("backward", names, x.dtype, x.size, platform), dy, x, names=names,
        params=params,
    )  # fmt: skip

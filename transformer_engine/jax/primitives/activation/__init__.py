"""y [..., F] = product over i of f_i(x [..., i, F]), and its gradient."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .request import ACTIVATIONS, ActivationParams, ActivationRequest

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
    """y [..., F] in x's dtype, computed in float32."""
    return compute(
        TABLE, lambda platform: ActivationRequest("forward", names, x.dtype, x.size, platform), x, names=names,
        params=params,
    )  # fmt: skip


def activation_backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """dx [..., n, F] in x's dtype."""
    return compute(
        TABLE, lambda platform: ActivationRequest("backward", names, x.dtype, x.size, platform), dy, x, names=names,
        params=params,
    )  # fmt: skip

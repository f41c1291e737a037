"""The activation, or its gradient, then the quantization of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..activation import ActivationParams, activation_backward, activation_forward
from ..quantize import Quantized, QuantizeSpec, quantize
from .request import ActivationCodesRequest


def forward(
    x: Array, scale: Array | None, names: tuple[str, ...], params: ActivationParams, spec: QuantizeSpec
) -> Quantized:
    """See `activation_codes`."""
    y = activation_forward(x, names, params)
    return quantize(y.reshape(-1, y.shape[-1]), spec, scale=scale)


def backward(
    dy: Array,
    x: Array,
    scale: Array | None,
    names: tuple[str, ...],
    params: ActivationParams,
    spec: QuantizeSpec,
    sums: bool,
) -> tuple[Quantized, Array | None]:
    """See `activation_backward_codes`."""
    dx = activation_backward(dy, x, names, params)
    dx = dx.reshape(-1, dx.shape[-2] * dx.shape[-1])
    return quantize(dx, spec, scale=scale), dx.astype(jnp.float32).sum(axis=0) if sums else None


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationCodesRequest](
    "separate", bind=lambda request: OPERATIONS[request.activation.operation]
)

"""The activation, or its gradient, then the quantization of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..activation import activation_backward, activation_forward
from ..quantize import Quantized, quantize
from .request import ActivationCodesRequest, How


def forward(x: Array, multiplier: Array | None, how: How) -> Quantized:
    """See `activation_codes`."""
    y = activation_forward(x, how.names, how.params)
    return quantize(y.reshape(-1, y.shape[-1]), how.spec, multiplier=multiplier)


def backward(dy: Array, x: Array, multiplier: Array | None, how: How) -> tuple[Quantized, Array | None]:
    """See `activation_backward_codes`."""
    dx = activation_backward(dy, x, how.names, how.params)
    dx = dx.reshape(-1, dx.shape[-2] * dx.shape[-1])
    sums = None if how.sums is None else dx.astype(jnp.float32).sum(axis=0).astype(how.sums)
    return quantize(dx, how.spec, multiplier=multiplier), sums


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationCodesRequest](
    "separate", bind=lambda request: OPERATIONS[request.activation.operation]
)

"""The activation, or its gradient, then the quantization of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..activation import activation_backward, activation_forward
from ..quantize import Quantized, quantize
from ..several_axes import with_rows
from .request import ActivationCodesRequest, How


def forward(x: Array, multiplier: Array | None, how: How) -> Quantized:
    """See `activation_codes`."""
    y = activation_forward(x, how.names, how.params)
    of_rows, axis = with_rows(y, 1)
    return quantize(of_rows, how.spec, multiplier=multiplier, axis=axis)


def backward(dy: Array, x: Array, multiplier: Array | None, how: How) -> tuple[Quantized, Array | None]:
    """See `activation_backward_codes`."""
    dx, axis = with_rows(activation_backward(dy, x, how.names, how.params), 2)
    sums = None
    if how.sums is not None:
        sums = dx.astype(jnp.float32).sum(axis=tuple(range(axis))).astype(how.sums)
    return quantize(dx, how.spec, multiplier=multiplier, axis=axis), sums


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationCodesRequest](
    "separate", bind=lambda request: OPERATIONS[request.activation.operation]
)

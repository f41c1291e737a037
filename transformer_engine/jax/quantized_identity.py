"""y = dequantize(quantize(x)): a value as its codes hold it, for functions that end in a quantizer."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from .quantize.quantizers import Quantizer, advanced_together, as_cotangent
from .undifferentiated import constant, undifferentiated


@jax.custom_vjp
def quantized_identity(x: Array, quantizer: Quantizer) -> Array:
    """x through the quantizer's codes; the gradient passes as it is, the quantizer's is its next state."""
    return _forward(x, quantizer)[0]


def _forward(x: Array, quantizer: Quantizer) -> tuple[Array, Any]:
    quantizer = constant(quantizer)
    tensor, amax = quantizer.encode(constant(x))
    (following,) = advanced_together((quantizer,), (amax,))
    y = tensor.dequantize()  # pyright: ignore[reportAttributeAccessIssue]
    return undifferentiated(y, x), following


def _backward(following: Any, dy: Array) -> tuple[Array, Any]:
    return dy, as_cotangent(following)


quantized_identity.defvjp(_forward, _backward)

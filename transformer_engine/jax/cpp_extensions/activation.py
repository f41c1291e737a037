"""y = f(x) and dx = dy * f'(x), quantized where a quantizer is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..quantize.quantizers import Quantizer
from .quantization import quantize


def act_lu(
    x: Array, activation_type: Sequence[str], quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
) -> Any:  # fmt: skip
    """y [.., h] of x [.., n, h]: a quantized tensor, or a NoScaleTensor."""
    y = activation_forward(x, tuple(activation_type), ActivationParams.of(act_params))
    return quantize(y, quantizer)


def dact_lu(
    dz: Array, x: Array, activation_type: Sequence[str], quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
) -> Any:  # fmt: skip
    """dx [.., n, h] of dz [.., h] and x."""
    dx = activation_backward(dz, x, tuple(activation_type), ActivationParams.of(act_params))
    return quantize(dx, quantizer, flatten_axis=-2)

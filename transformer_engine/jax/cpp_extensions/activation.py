"""y = f(x) and dx = dy * f'(x), quantized where a quantizer is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..quantize.quantizers import Quantizer
from .base import BasePrimitive
from .quantization import by_reference, quantize, quantize_dbias


class ActLuPrimitive(BasePrimitive):
    """Activations."""


class DActLuDBiasQuantizePrimitive(BasePrimitive):
    """Gradients of activations."""


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


def dact_lu_dbias(
    dz: Array, x: Array, activation_type: Sequence[str], is_dbias: bool = True, quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
) -> tuple[Any, Array | None]:  # fmt: skip
    """(dx [.., n, h], its sums over all axes in front of n)."""
    dx = activation_backward(dz, x, tuple(activation_type), ActivationParams.of(act_params))
    return quantize_dbias(dx, quantizer, is_dbias, flatten_axis=-2)


_jax_act_lu = by_reference(act_lu)
_jax_quantize_dact_dbias = by_reference(dact_lu_dbias)

"""Activations y = f(x) and their gradients dx = dy * f'(x), with optional quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from ..activation import check_activation
from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..quantize.quantizers import Quantizer
from ..runtime.checks import check_shaped, check_values
from .amax import AmaxScope
from .base import BasePrimitive
from .quantization import by_reference, quantize_dbias, quantize_result


class ActLuPrimitive(BasePrimitive):
    """Switch for activation kernels."""


class DActLuDBiasQuantizePrimitive(BasePrimitive):
    """Switch for activation-gradient kernels."""


def act_lu(
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Compute the activation [..., h] for x [..., n, h], quantized, or as a NoScaleTensor without a quantizer.

    Args:
        x: Input [..., n, h].
        activation_type: n activation names; the results are multiplied.
        quantizer: Output quantizer, or None.
        act_params: Parameters for clamped activations.
        amax_scope: Devices that share the maximum inside shard_map.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis; does not change the result.
        output_amax_when_no_scaling: Whether a NoScaleTensor contains the absolute maximum of the output.
    """
    check_values("x", x)
    y = activation_forward(
        x, check_activation(activation_type, x.shape), ActivationParams.of(act_params)
    )
    return quantize_result(
        y, quantizer, amax_scope, transpose_batch_sequence, output_amax_when_no_scaling
    )


def dact_lu(
    dz: Array,
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Compute the gradient dx [..., n, h] from dz [..., h] and x [..., n, h], quantized as in `act_lu`.

    dx has x's dtype. dz is converted to that dtype, which the forward pass's output also has.
    """
    dx = _gradient(dz, x, activation_type, act_params)
    return quantize_result(
        dx,
        quantizer,
        amax_scope,
        transpose_batch_sequence,
        output_amax_when_no_scaling,
        flatten_axis=-2,
    )


def dact_lu_dbias(
    dz: Array,
    x: Array,
    activation_type: Sequence[str],
    is_dbias: bool = True,
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, Array | None]:
    """Compute dx [..., n, h] as `dact_lu`, and its sums [n, h] over the other axes, or None unless is_dbias."""
    dx = _gradient(dz, x, activation_type, act_params)
    tensor = quantize_result(
        dx,
        quantizer,
        amax_scope,
        transpose_batch_sequence,
        output_amax_when_no_scaling,
        flatten_axis=-2,
    )
    return tensor, quantize_dbias(dx, None, is_dbias, flatten_axis=-2)[1]


def _gradient(
    dz: Array,
    x: Array,
    activation_type: Sequence[str],
    act_params: ActivationParams | Mapping[str, float] | None,
) -> Array:
    check_values("x", x)
    names = check_activation(activation_type, x.shape)
    check_shaped("dz", dz, (*x.shape[:-2], x.shape[-1]))
    return activation_backward(dz.astype(x.dtype), x, names, ActivationParams.of(act_params))


def quantize_dact_dbias(
    dz: Array,
    x: Array,
    activation_type: Sequence[str] = ("gelu",),
    is_dbias: bool = True,
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
    amax_scope: AmaxScope = AmaxScope.LOCAL,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, Array | None]:
    """Same as `dact_lu_dbias`, under NVIDIA's name for the fused operation."""
    return dact_lu_dbias(
        dz,
        x,
        activation_type,
        is_dbias,
        quantizer,
        act_params,
        amax_scope,
        transpose_batch_sequence,
        output_amax_when_no_scaling,
    )


_jax_act_lu = by_reference(act_lu)
_jax_quantize_dact_dbias = by_reference(quantize_dact_dbias)

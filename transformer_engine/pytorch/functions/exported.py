"""Layer forward passes in operators that ONNX can express: ATen, and tex operators for quantizations.

An FP8 product is two tex operators, quantize and dequantize, per operand, and a float32 product of the values. An
exporter writes the pairs as QuantizeLinear and DequantizeLinear, which a runtime may merge with the product.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..primitives.activation import ActivationParams
from ..primitives.activation.reference import value
from ..primitives.quantize import exported as tex
from ..tensor.elements import float8_dtype
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from ..tensor.mxfp8_tensor import MXFP8Quantizer
from ..tensor.quantizer import Quantizer
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .normalization import Norm


@singledispatch
def round_trip(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Return the float32 values behind the codes of x [.., K], quantized along its last dimension.

    Raises:
        NotImplementedError: ONNX has no operator for the format.
    """
    raise NotImplementedError(
        f"{type(quantizer).__name__} cannot be exported: ONNX has no such quantization; export under DelayedScaling, "
        "Float8CurrentScaling or MXFP8BlockScaling, or in high precision outside of autocast"
    )


@round_trip.register
def _(quantizer: Float8Quantizer, x: Tensor) -> Tensor:
    # The present scale, which the graph contains as a constant: an exported program records no maxima.
    scale = quantizer.scale.detach().reshape(1).clone()
    codes = tex.fp8_quantize(x, scale, float8_dtype(quantizer.dtype))
    return tex.fp8_dequantize(codes, scale.reciprocal())


@round_trip.register
def _(quantizer: Float8CurrentScalingQuantizer, x: Tensor) -> Tensor:
    if quantizer.with_amax_reduction:
        raise NotImplementedError(
            "with_amax_reduction=True cannot be exported: ONNX has no collectives; export the layer of one rank "
            "without amax_reduction_group"
        )
    dtype = float8_dtype(quantizer.dtype)
    return tex.fp8_dequantize(
        *tex.fp8_cs_quantize(x, dtype, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    )


@round_trip.register
def _(quantizer: MXFP8Quantizer, x: Tensor) -> Tensor:
    if quantizer.with_2d_quantization:
        raise NotImplementedError(
            "MXFP8 with scales of 32 x 32 values cannot be exported: ONNX has blocks along one axis; use "
            "with_2d_quantization=False"
        )
    return tex.mxfp8_dequantize(*tex.mxfp8_quantize(x, float8_dtype(quantizer.dtype)))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, quantizers: tuple[Quantizer, Quantizer]
) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight.T + bias in the dtype of x.

    Args:
        x: Input.
        weight: Weight [N, K].
        bias: Bias [N], or None.
        quantizers: Quantizers for x and the weight; identities for a product in high precision.

    Raises:
        NotImplementedError: The weight is a quantized tensor, or ONNX has no operator for a format.
    """
    of_input, of_weight = quantizers
    if isinstance(weight, QuantizedTensorStorage):
        raise NotImplementedError(
            f"a weight that is {with_article(type(weight))} cannot be exported: the exporter takes its codes apart; "
            "load te.plain_state_dict(model) into a model made outside of quantized_model_init, and export that one"
        )
    if of_input.is_identity and of_weight.is_identity:
        return torch.nn.functional.linear(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        )
    y = torch.nn.functional.linear(
        x.float() if of_input.is_identity else round_trip(of_input, x),
        weight.float() if of_weight.is_identity else round_trip(of_weight, weight),
        None if bias is None else bias.float(),
    )
    return y.to(x.dtype)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """Normalize the last dimensions of x in float32; weight and bias have their shape, and y has the dtype of x."""
    gamma = weight.float() + 1.0 if norm.zero_centered else weight.float()
    wide = x.float()
    if norm.kind == "LayerNorm":
        beta = None if bias is None else bias.float()
        return torch.nn.functional.layer_norm(wide, weight.shape, gamma, beta, norm.eps).to(x.dtype)
    axes = tuple(range(-weight.dim(), 0))
    inverse = torch.rsqrt(wide.square().mean(dim=axes, keepdim=True) + norm.eps)
    return (wide * inverse * gamma).to(x.dtype)


def activate(name: str, x: Tensor, params: ActivationParams) -> Tensor:
    """Compute y = f(x) in float32, or for a gated unit y [.., F] from x [.., 2F], in the dtype of x."""
    return value(name, x, params.constants)

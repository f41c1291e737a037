"""tex::fp8_quantize and its family: operators that an exporter writes as QuantizeLinear and DequantizeLinear.

A tracing exporter does not look into them, so that a graph contains one node per quantization instead of the
bit operations of the encodings. In eager mode they run the quantizations in `quantize`. Codes are tensors in
torch's float8 dtypes, and scales are float32 values that codes are multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.formats import E4M3, E5M2, FLOAT8, MXFP8, Element
from ...runtime.operator_definition import define_operator
from . import QuantizeSpec, e8m0_to_float, quantize, torch_dtype

BLOCK = 32  # elements that share a scale in MXFP8
_ELEMENTS = {torch_dtype(element): element for element in (E4M3, E5M2)}


def element_of_dtype(dtype: torch.dtype) -> Element:
    """Return the FP8 element of a torch dtype.

    Raises:
        ValueError: The dtype is not torch.float8_e4m3fn or torch.float8_e5m2.
    """
    if dtype not in _ELEMENTS:
        raise ValueError(
            f"dtype={dtype} is not an FP8 format; use torch.float8_e4m3fn or torch.float8_e5m2"
        )
    return _ELEMENTS[dtype]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _fp8_quantize(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    spec = QuantizeSpec(FLOAT8, element_of_dtype(dtype), rowwise=True, columnwise=False)
    codes = quantize(_rows(tensor), spec, multiplier=scale.reshape(1)).codes
    assert codes is not None
    return codes.view(tensor.shape)


def _fp8_cs_quantize(
    tensor: Tensor, dtype: torch.dtype, amax_epsilon: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    element = element_of_dtype(dtype)
    spec = QuantizeSpec(
        FLOAT8,
        element,
        rowwise=True,
        columnwise=False,
        power_of_two=power_of_two,
        epsilon=amax_epsilon,
    )
    quantized = quantize(_rows(tensor), spec)
    assert quantized.codes is not None and quantized.scale is not None
    return quantized.codes.view(tensor.shape), quantized.scale.reshape(1).clone()


def _mxfp8_quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    quantized = quantize(
        _rows(tensor), QuantizeSpec(MXFP8, element_of_dtype(dtype), rowwise=True, columnwise=False)
    )
    assert quantized.codes is not None and quantized.scale is not None
    scale_inv = e8m0_to_float(quantized.scale).view(*tensor.shape[:-1], tensor.shape[-1] // BLOCK)
    return quantized.codes.view(tensor.shape), scale_inv


def _fp8_dequantize(codes: Tensor, scale_inv: Tensor) -> Tensor:
    return codes.to(torch.float32) * scale_inv


def _mxfp8_dequantize(codes: Tensor, scale_inv: Tensor) -> Tensor:
    blocks = codes.to(torch.float32).unflatten(-1, (-1, BLOCK))
    return (blocks * scale_inv[..., None]).view(codes.shape)


def _empty_codes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.new_empty(tensor.shape, dtype=dtype)


def _empty_values(codes: Tensor, scale_inv: Tensor) -> Tensor:
    return scale_inv.new_empty(codes.shape)


def _register(schema: str, eager: Callable[..., Any], results: Callable[..., Any]) -> Any:
    """Register tex::schema for every device and return the operator; `results` allocates the results of `eager`."""
    return define_operator("tex", schema, "default", eager, results).default


fp8_quantize = _register(
    "fp8_quantize(Tensor tensor, Tensor scale, ScalarType dtype) -> Tensor",
    _fp8_quantize,
    lambda tensor, scale, dtype: _empty_codes(tensor, dtype),
)
fp8_cs_quantize = _register(
    "fp8_cs_quantize(Tensor tensor, ScalarType dtype, float amax_epsilon, bool power_of_two) -> (Tensor, Tensor)",
    _fp8_cs_quantize,
    lambda tensor, dtype, amax_epsilon, power_of_two: (
        _empty_codes(tensor, dtype),
        tensor.new_empty(1, dtype=torch.float32),
    ),
)
fp8_dequantize = _register(
    "fp8_dequantize(Tensor codes, Tensor scale_inv) -> Tensor", _fp8_dequantize, _empty_values
)
mxfp8_quantize = _register(
    "mxfp8_quantize(Tensor tensor, ScalarType dtype) -> (Tensor, Tensor)",
    _mxfp8_quantize,
    lambda tensor, dtype: (
        _empty_codes(tensor, dtype),
        tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // BLOCK), dtype=torch.float32),
    ),
)
mxfp8_dequantize = _register(
    "mxfp8_dequantize(Tensor codes, Tensor scale_inv) -> Tensor", _mxfp8_dequantize, _empty_values
)

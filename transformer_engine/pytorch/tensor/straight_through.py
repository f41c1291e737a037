"""Straight-through gradients: quantization and dequantization are identities for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Function


class Quantize(Function):
    """quantizer(x), whose gradient is the output's gradient."""

    OPERATION = "a quantizer"

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Any, dtype: torch.dtype | None) -> Any:
        return quantizer._quantize(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output, None, None


class Dequantize(Function):
    """The values of a quantized tensor in a dtype; the gradient has the tensor's nominal dtype."""

    OPERATION = "dequantize"

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.decode(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output.to(ctx.dtype), None

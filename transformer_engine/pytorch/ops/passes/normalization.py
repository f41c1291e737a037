"""Passes for normalizations.

The kernel of a norm quantizes its output if the next operation requests a cast (`input_request`). Linear
products do so under a recipe; `input_cast` (`functions/linear_operands.py`) lists the
conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...functions.normalization import Norm
from ...functions.row_operations import l2_norm, l2_norm_backward
from ...offload.marks import active as offloading
from ...offload.marks import keep_weight
from ...tensor.storage.quantized_tensor_storage import plain_matrix
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class NormPasses(OperationPasses):
    """Normalization over the last dimensions.

    Args:
        norm: Row norm.
        shape: Parameter shape.
        convert: Dtype that the input is converted to; None if it has the right one.
        gradient_dtype: Dtype that the gradient is converted to; None to leave it.
    """

    def __init__(
        self,
        norm: Norm,
        shape: tuple[int, ...],
        convert: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self.norm, self.shape, self.convert, self.gradient_dtype = (
            norm,
            shape,
            convert,
            gradient_dtype,
        )
        self.rows_only = len(shape) == 1  # else several x dimensions form a row
        self.casts_output = self.rows_only
        self.listed = self.rows_only and convert is None

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.converted(self.convert)
        weight, bias = [*tensors.parameters, None][:2]
        assert weight is not None
        if offloading.synchronizer is not None:
            keep_weight(weight)
        if self.rows_only:
            x = x.matrix()
            if request is None:
                y, mean, rstdev = self.norm.forward(plain_matrix(x.data), weight, bias)
            else:
                codes, mean, rstdev = self.norm.forward(
                    plain_matrix(x.data), weight, bias, request.cast
                )
                y = request.quantizer.adopt(codes, x.data.dtype)
            return ForwardResult(Value(y, x.leading), (x.data, mean, rstdev, weight))
        values = x.shaped()
        rows, weight = values.reshape(-1, math.prod(self.shape)), weight.reshape(-1)
        y, mean, rstdev = self.norm.forward(
            rows, weight, None if bias is None else bias.reshape(-1)
        )
        return ForwardResult(Value(y.reshape(values.shape)), (values, mean, rstdev, weight))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
        addend: Tensor | None = None,
    ) -> BackwardResult:
        """Compute the gradients; with an addend [M, N] dx is the sum with it (see `passes/patterns.py`)."""
        dy, x, mean, rstdev, weight = operands
        operands.clear()
        dy = Value(dy, leading)
        if self.rows_only:
            dy = dy.matrix()
            dx, *of_parameters = self.norm.backward(
                plain_matrix(dy.data), plain_matrix(x), mean, rstdev, weight, addend
            )
            result = Value(dx, dy.leading)
        else:
            shape, columns = x.shape, math.prod(self.shape)
            dx, *of_parameters = self.norm.backward(
                dy.shaped().reshape(-1, columns), x.reshape(-1, columns), mean, rstdev, weight
            )
            of_parameters = [
                None if grad is None else grad.reshape(self.shape) for grad in of_parameters
            ]
            result = Value(dx.reshape(shape))
        count = 2 if self.norm.kind == "LayerNorm" else 1
        return BackwardResult(result.converted(self.gradient_dtype), of_parameters[:count])


class L2Passes(OperationPasses):
    """y = x / sqrt(sum(x^2) + eps)."""

    listed = False

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.matrix()
        y, rstdev = l2_norm(x.data, self.eps)
        return ForwardResult(Value(y, x.leading), (x.data, rstdev))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy, *saved = operands
        operands.clear()
        dy = Value(dy, leading).matrix()
        return BackwardResult(Value(l2_norm_backward(dy.data, *saved), dy.leading))

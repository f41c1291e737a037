"""Passes for an added bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...functions.gathered_operands import GradientOperands
from ...functions.linear_operands import dense_values
from ...primitives.column_sums import column_sums
from ...primitives.gemm import as_matrix
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class BiasPasses(OperationPasses):
    """y = x + bias.

    Args:
        convert: Dtype that the bias is converted to; None if it has the input's.
        dtype: Bias and gradient dtype.
        grad: The bias gradient is needed.
    """

    absent_gradients = (None,)
    casts_gradient = True

    def __init__(self, convert: torch.dtype | None, dtype: torch.dtype, grad: bool) -> None:
        self.convert, self.dtype, self.grad = convert, dtype, grad

    def gradient_is_unchanged(self, grads: Sequence[Any]) -> bool:
        return not self.grad

    def bias(self, tensors: OpTensors) -> Tensor:
        """The bias in the dtype of the input."""
        (bias,) = tensors.parameters
        return bias if self.convert is None else bias.to(self.convert)

    def gradient_request(self, earlier: ReaderCast | None) -> ReaderCast | None:
        return None if earlier is None else earlier._replace(sums=self.dtype)

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.matrix()
        return ForwardResult(Value(x.data + self.bias(tensors), x.leading, True))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = operands.pop()
        if isinstance(dy, GradientOperands):  # by the kernel that computed dy
            return BackwardResult(Value(dy, leading), (dy.sums,))
        dy = Value(dense_values(dy), leading)
        matrix = as_matrix(dy.data)
        if request is None or request.sums is not None:
            return BackwardResult(dy, (column_sums(matrix, self.dtype),))
        # One kernel reads dy for its codes and its column sums.
        codes, sums = column_sums(matrix, self.dtype, request.cast)
        operands_of_dy = request.quantizer.adopt(codes, matrix.dtype)
        return BackwardResult(
            Value(GradientOperands(operands_of_dy, None), dy.leading_dimensions()), (sums,)
        )

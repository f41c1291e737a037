"""Passes for the two ends of a residual connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...primitives.gemm import as_matrix
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ...tensor.storage.quantized_tensor_storage import plain_values
from ..links import sum_values
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class AddPasses(OperationPasses):
    """y = x + extra.

    Args:
        in_place: Add x into the memory of the extra input.
        shared: Other operations read that memory, so that a copy is written.
    """

    def __init__(self, in_place: bool, shared: bool) -> None:
        self.in_place = in_place
        self.shared = shared
        self.listed = not (in_place and shared)

    def total(self, tensors: OpTensors) -> Tensor:
        """The matrix [M, N] in the memory of the extra input, or in a copy, to which x is added."""
        (extra,) = tensors.extra
        if self.shared:
            return as_matrix(plain_values(extra).clone(memory_format=torch.contiguous_format))
        return as_matrix(extra.detach())

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.matrix()
        if self.in_place:
            return ForwardResult(Value(self.total(tensors).add_(x.data), x.leading))
        return ForwardResult(
            Value(x.data + as_matrix(tensors.extra[0]).reshape(x.data.shape), x.leading)
        )

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = Value(operands.pop(), leading)
        return BackwardResult(dy, (), (dy,))


class ExtraOutputPasses(OperationPasses):
    """y = x, which is also an extra output.

    Args:
        in_place: Add the gradient of y into a copy of the extra output's gradient.
    """

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def gradient_is_unchanged(self, grads: Sequence[Any]) -> bool:
        return grads[0] is None

    def total(self, extra: Tensor) -> Tensor:
        """A copy [M, N] of the extra output's gradient, because autograd may pass the same tensor to others."""
        return as_matrix(extra.clone(memory_format=torch.contiguous_format))

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = Value(x.data, x.leading)
        return ForwardResult(x, (), (x,))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy, (extra,) = Value(operands.pop(), leading), grads
        if extra is None:
            return BackwardResult(dy)
        if isinstance(dy.data, QuantizedTensorStorage) or isinstance(extra, QuantizedTensorStorage):
            return BackwardResult(Value(sum_values(dy.result(), extra)))
        dy = dy.matrix()
        if self.in_place:
            return BackwardResult(Value(self.total(extra).add_(dy.data), dy.leading))
        return BackwardResult(Value(dy.data + as_matrix(extra).reshape(dy.data.shape), dy.leading))

"""Passes for operations without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...primitives.dropout import draw_seed, dropout_backward, dropout_forward
from ...tensor.quantized_tensor import QuantizedTensorStorage
from ...tensor.quantizer import Quantizer
from ...tensor.storage.quantized_tensor_storage import plain_values
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class ReshapePasses(OperationPasses):
    """y = x.reshape(shape)."""

    listed = False

    def __init__(self, shape: tuple[int, ...], input_shape: tuple[int, ...]) -> None:
        self.shape, self.input_shape = shape, input_shape

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        return ForwardResult(Value(x.shaped().reshape(self.shape)))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = operands.pop()
        if not isinstance(dy, QuantizedTensorStorage):
            dy = Value(dy, leading).shaped()
        elif not isinstance(dy, Tensor):
            dy = plain_values(dy)
        return BackwardResult(Value(dy.reshape(self.input_shape)))


class ScalePasses(OperationPasses):
    """y = x * scale."""

    listed = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.values()
        return ForwardResult(Value(x.data * self.scale, x.leading))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = Value(operands.pop(), leading).values()
        return BackwardResult(Value(dy.data * self.scale, dy.leading))


class DropoutPasses(OperationPasses):
    """y = x * mask / (1 - p)."""

    listed = False

    def __init__(self, p: float) -> None:
        self.p = p

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        x = x.values()
        y, mask = dropout_forward(x.data, self.p, seed=draw_seed(x.data.device))
        return ForwardResult(Value(y, x.leading), (mask,))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy, mask = operands
        operands.clear()
        dy = Value(dy, leading).values()
        return BackwardResult(Value(dropout_backward(dy.data, mask, self.p), dy.leading))


class QuantizePasses(OperationPasses):
    """y = quantize(x), dx = quantize(dy); None for a direction that is not quantized."""

    listed = False

    def __init__(self, output: Quantizer | None, gradient: Quantizer | None) -> None:
        self.output, self.gradient = output, gradient
        self.is_identity = output is None

    def gradient_is_unchanged(self, grads: Sequence[Any]) -> bool:
        return self.gradient is None

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        if self.output is None or isinstance(x.data, QuantizedTensorStorage):
            return ForwardResult(x)
        return ForwardResult(Value(self.output.quantize(x.shaped())))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = operands.pop()
        if self.gradient is None or isinstance(dy, QuantizedTensorStorage):
            return BackwardResult(Value(dy, leading))
        return BackwardResult(Value(self.gradient.quantize(Value(dy, leading).shaped())))

"""Passes for collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...distributed.tensor_parallel import TensorParallel
from ...functions.communication import begin
from ...functions.linear_operands import dense_values
from .contract import (
    BackwardResult,
    ForwardResult,
    Leading,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)


class CollectivePasses(OperationPasses):
    """A collective in the forward pass, and another one in the backward pass.

    Args:
        collective: Forward-pass collective.
        gradient: Backward-pass collective; None for the identity.
        parallel: The group.
    """

    def __init__(self, collective: str, gradient: str | None, parallel: TensorParallel) -> None:
        self.collective, self.gradient, self.parallel = collective, gradient, parallel

    def gradient_is_unchanged(self, grads: Sequence[Any]) -> bool:
        return self.gradient is None

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        y = x.shaped()
        if self.collective == "all_reduce" and not x.owned:
            y = y.clone(memory_format=torch.contiguous_format)  # the sum is written in place
        return ForwardResult(Value(begin(self.collective, dense_values(y), self.parallel).wait()))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy = Value(operands.pop(), leading)
        if self.gradient is None:
            return BackwardResult(dy)
        return BackwardResult(
            Value(begin(self.gradient, dense_values(dy.shaped()), self.parallel).wait())
        )

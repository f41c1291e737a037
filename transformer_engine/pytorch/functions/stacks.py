"""weight [n, N, K] and bias [n, N] of all groups as one parameter each: their members, and their one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from .weight_gradient import WeightGradient, main_grad_of


def members_of(stack: Tensor) -> list[Any]:
    """The n matrices, or vectors, of a stack: views; storages where it is quantized."""
    if isinstance(stack, QuantizedTensorStorage):
        return storage_of(stack).members()  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return list(stack.unbind(0))


def stacked_gradient(members: Sequence[Tensor | None], gradient: WeightGradient) -> Tensor | None:
    """The gradient of a stack: that of its members, or what stands for it where they went to its main_grad."""
    given = [member for member in members if member is not None]
    if given:
        return torch.stack(given)
    if not gradient.fused:
        return None
    whole = tuple(member.whole for member in gradient.parameters)
    return WeightGradient(whole, True)._placeholder(whole[0].dtype)


class StackMember:
    """stack[i], as the accumulation of a gradient sees a parameter of its own."""

    __slots__ = ("_index", "whole")

    def __init__(self, whole: Any, index: int):
        self.whole = whole
        self._index = index

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape[1:]

    @property
    def requires_grad(self) -> bool:
        return self.whole.requires_grad

    @property
    def overwrite_main_grad(self) -> bool:
        return getattr(self.whole, "overwrite_main_grad", False)

    @property
    def main_grad(self) -> Tensor:
        return main_grad_of(self.whole)[self._index]

    @property
    def grad(self) -> Tensor | None:
        return None if self.whole.grad is None else self.whole.grad[self._index]

    @grad.setter
    def grad(self, gradient: Tensor) -> None:
        if self.whole.grad is None:
            self.whole.grad = torch.zeros(self.whole.shape, dtype=gradient.dtype, device=gradient.device)
        self.whole.grad[self._index] = gradient

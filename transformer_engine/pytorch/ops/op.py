"""BasicOperation: y = operation(x) with an extra state, what every operation of this package will derive from.

No operation is here yet. The classes are, because libraries that save checkpoints wrap their methods when they are
imported, and because an operation of one's own can be a module on them: it overrides `op_forward` and `op_backward`.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..runtime.double_backward import once_differentiable


class FusibleOperation(torch.nn.Module, metaclass=ABCMeta):
    """What a sequence of operations holds."""

    @property
    @abstractmethod
    def is_fused_op(self) -> bool:
        """Is it made of several basic operations?"""


class BasicOperation(FusibleOperation, metaclass=ABCMeta):
    """One operation with one input and one output.

    op_forward(ctx, x)     y; what the backward needs goes to ctx.save_for_backward
    op_backward(ctx, dy)   (dx, gradients of the parameters in their order)
    """

    num_extra_inputs = 0
    num_extra_outputs = 0

    @property
    def is_fused_op(self) -> bool:
        return False

    @abstractmethod
    def op_forward(self, ctx: Any, input_: Tensor, **options: Any) -> Tensor: ...

    @abstractmethod
    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Iterable[Tensor | None]]: ...

    def num_quantizers(self, mode: str) -> int:
        """How many tensors of a pass, "forward" or "backward", it quantizes."""
        return 0

    def forward(self, input: Tensor, **options: Any) -> Tensor:
        parameters = tuple(self.parameters())
        return _Operation.apply(input, self, options, *parameters)  # pyright: ignore[reportReturnType]

    def get_extra_state(self) -> Tensor:
        """Empty: an operation that quantizes nothing has no state beside its parameters."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor | None) -> None:
        """Takes what `get_extra_state` gives; ValueError for the state of an operation that quantizes."""
        if state is not None and state.numel():
            raise ValueError(
                f"{type(self).__name__} has no scales, the checkpoint holds {state.numel()} bytes of them; "
                "load it into the operation it was saved from"
            )


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, operation, options, *parameters):
        ctx.operation = operation
        return operation.op_forward(ctx, input_, **options)

    @staticmethod
    @once_differentiable("BasicOperation")
    def backward(ctx, grad_output):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_input, grads = ctx.operation.op_backward(ctx, grad_output)
        return grad_input, None, None, *grads

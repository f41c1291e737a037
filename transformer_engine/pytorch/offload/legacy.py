"""The original's first form of offloading (NVTE_CPU_OFFLOAD_V1=1): a layer ends where its group is committed.

The same schedule as `DefaultOffloadSynchronizer`, told by a node of the graph behind each layer instead of by a hook
on the layer's last node, so that the layer's output may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.double_backward import once_differentiable
from .hooks import OffloadContext, begins_backward
from .synchronizer import DefaultOffloadSynchronizer


class SynchronizedGroupOffloadHandler(DefaultOffloadSynchronizer):
    """One group of saved tensors a layer; the first num_offload_group of model_layers groups are offloaded."""

    def __init__(self, num_offload_group: int, model_layers: int | None = None, **options: Any):
        super().__init__(
            num_offload_group + 1 if model_layers is None else model_layers, num_offload_group, **options
        )
        self.num_offload_group = num_offload_group


class AsyncDoubleBufferGroupOffloadHandler(SynchronizedGroupOffloadHandler):
    """The same; copies run beside the computation in either."""


class CpuOffloadHookWithOffloadHandler(OffloadContext):
    """The context of a handler."""

    def __init__(self, offload_handler: DefaultOffloadSynchronizer):
        super().__init__(offload_handler)
        self.offload_handler = offload_handler


class GroupCommitFunction(torch.autograd.Function):
    """y = x; its backward is the beginning of a layer's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: OffloadContext) -> Tensor:
        if context.current_layer is None:
            raise RuntimeError("a group was committed before any layer; enter the context first")
        ctx.begin = begins_backward(context.offload_synchronizer, context.current_layer)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable("a group of offloaded tensors")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.begin((grad,))
        return grad, None


def context_of_groups(num_layers: int, model_layers: int) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """(context, commit) of the first form."""
    context = CpuOffloadHookWithOffloadHandler(AsyncDoubleBufferGroupOffloadHandler(num_layers, model_layers))

    def commit(tensor: Tensor) -> Tensor:
        return GroupCommitFunction.apply(tensor, context)  # pyright: ignore[reportReturnType]

    return context, commit

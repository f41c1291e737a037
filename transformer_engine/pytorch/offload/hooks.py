"""Contexts that pass the saved tensors of a layer to a synchronizer, by torch's saved-tensor hooks.

The classes at the end are NVIDIA's first version (NVTE_CPU_OFFLOAD_V1=1): a layer ends where its group
is committed. The schedule follows `DefaultOffloadSynchronizer`; a graph node after each layer starts its
steps instead of a hook on the layer's last node, so that the layer's output may come from any operation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described
from ..runtime.autograd import TorchFunction
from ..runtime.double_backward import once_differentiable
from .marks import active
from .synchronizer import DefaultOffloadSynchronizer, OffloadSynchronizer


class OffloadContext(ContextDecorator):
    """Passes the tensors that a layer's forward saves to a synchronizer; enter it once per layer."""

    def __init__(self, synchronizer: OffloadSynchronizer):
        self.offload_synchronizer = synchronizer
        self.previous_offload_synchronizer: OffloadSynchronizer | None = None
        self.current_layer: int | None = None
        self.inside_context = False
        self._hooks: Any = None

    def __enter__(self) -> OffloadContext:
        if self.inside_context:
            raise RuntimeError(
                "this offloading context is open already; leave it after each layer's forward"
            )
        self.current_layer = self.offload_synchronizer.fwd_step()
        self.previous_offload_synchronizer = active.synchronizer
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self.offload_synchronizer.push_tensor, self.offload_synchronizer.pop_tensor
        )
        self._hooks.__enter__()
        active.synchronizer = self.offload_synchronizer
        type(active).used = True
        self.inside_context = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.inside_context = False
        active.synchronizer = self.previous_offload_synchronizer
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*exception)
        # the step ends here, and the next one begins with the first layer
        if exception[0] is not None:
            self.offload_synchronizer.num_of_fwds = None

    def synchronize(self, tensor: Tensor) -> Tensor:
        """Register the backward of the last layer at its output, and return this tensor.

        A tensor without a gradient (an evaluation, frozen first layers) has no backward, and its layer saved nothing.
        """
        if self.inside_context:
            raise RuntimeError(
                "the synchronizing function was called inside of the context; call it after the context"
            )
        if self.current_layer is None:
            raise RuntimeError(
                "the synchronizing function was called before any layer; enter the context first"
            )
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            return tensor
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            raise ValueError(f"{described(tensor)} has no backward; give the output of the layer")
        tensor.grad_fn.register_prehook(
            backward_hook(self.offload_synchronizer, self.current_layer)
        )
        return tensor


def backward_hook(synchronizer: OffloadSynchronizer, layer: int) -> Callable[[Any], None]:
    """Return a node hook that begins the backward of a layer whose forward has just run."""
    generation = synchronizer.layer_states[layer].generation

    def begin(gradients: Any) -> None:
        if synchronizer.bwd_step(layer, generation):
            torch.autograd.Variable._execution_engine.queue_callback(
                synchronizer.finish_part_of_bwd
            )

    return begin


class SynchronizedGroupOffloadHandler(DefaultOffloadSynchronizer):
    """One saved-tensor group per layer; the first num_offload_group of model_layers groups are offloaded.

    Args:
        num_offload_group: Layer count whose saved tensors are offloaded.
        model_layers: Layer count; None is one more than are offloaded.
        options: Other arguments of `DefaultOffloadSynchronizer`.
    """

    def __init__(self, num_offload_group: int, model_layers: int | None = None, **options: Any):
        super().__init__(
            num_offload_group + 1 if model_layers is None else model_layers,
            num_offload_group,
            **options,
        )
        self.num_offload_group = num_offload_group


class AsyncDoubleBufferGroupOffloadHandler(SynchronizedGroupOffloadHandler):
    """The same as `SynchronizedGroupOffloadHandler`: copies overlap with the computation in both.

    The other arguments are as in `SynchronizedGroupOffloadHandler`.
    """


class CpuOffloadHookWithOffloadHandler(OffloadContext):
    """Context whose saved tensors a handler offloads.

    Args:
        offload_handler: Schedules the copies.
    """

    def __init__(self, offload_handler: DefaultOffloadSynchronizer):
        super().__init__(offload_handler)
        self.offload_handler = offload_handler


class GroupCommitFunction(TorchFunction):
    """Identity whose backward pass begins the backward pass of a layer; call `apply(output, context)`.

    Args:
        args (Any): Of `apply`: the layer's output, and the context.
        kwargs (Any): Accepted by `torch.autograd.Function`; has no effect.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: OffloadContext) -> Tensor:
        if context.current_layer is None:
            raise RuntimeError("a group was committed before any layer; enter the context first")
        ctx.begin = backward_hook(context.offload_synchronizer, context.current_layer)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable("a group of offloaded tensors")
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.begin((grad,))
        return grad, None


def context_of_groups(num_layers: int, model_layers: int) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return (context, commit) for the first version."""
    context = CpuOffloadHookWithOffloadHandler(
        AsyncDoubleBufferGroupOffloadHandler(num_layers, model_layers)
    )
    return context, lambda tensor: GroupCommitFunction.apply(tensor, context)

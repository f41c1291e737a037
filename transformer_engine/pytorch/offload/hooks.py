"""What a layer saves inside of a context goes through a synchronizer, by torch's hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described
from .marks import active
from .synchronizer import OffloadSynchronizer


class OffloadContext(ContextDecorator):
    """Entered once for each layer: what the layer's forward saves for its backward goes through a synchronizer."""

    def __init__(self, synchronizer: OffloadSynchronizer):
        self.offload_synchronizer = synchronizer
        self.previous_offload_synchronizer: OffloadSynchronizer | None = None
        self.current_layer: int | None = None
        self.inside_context = False
        self._hooks: Any = None

    def __enter__(self) -> OffloadContext:
        if self.inside_context:
            raise RuntimeError("this offloading context is open already; leave it after each layer's forward")
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
        if exception[0] is not None:  # the step ends here, and the next one begins with the first layer
            self.offload_synchronizer.num_of_fwds = None

    def synchronize(self, tensor: Tensor) -> Tensor:
        """The tensor itself, the output of the layer called last: its backward begins where the tensor's does.

        One that needs no gradient (an evaluation, frozen first layers) has no backward, and its layer saved nothing.
        """
        if self.inside_context:
            raise RuntimeError("the synchronizing function was called inside of the context; call it behind")
        if self.current_layer is None:
            raise RuntimeError(
                "the synchronizing function was called before any layer; enter the context first"
            )
        if isinstance(tensor, Tensor) and not tensor.requires_grad:
            return tensor
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            raise ValueError(f"{described(tensor)} has no backward; give the output of the layer")
        tensor.grad_fn.register_prehook(begins_backward(self.offload_synchronizer, self.current_layer))
        return tensor


def begins_backward(synchronizer: OffloadSynchronizer, layer: int) -> Callable[[Any], None]:
    """Return a hook of a node that begins the backward of a layer, whose forward has just run."""
    return partial(_begin_backward, synchronizer, layer, synchronizer.layer_states[layer].generation)


def _begin_backward(synchronizer: OffloadSynchronizer, layer: int, generation: int, gradients: Any) -> None:
    if synchronizer.bwd_step(layer, generation):
        torch.autograd.Variable._execution_engine.queue_callback(synchronizer.finish_part_of_bwd)

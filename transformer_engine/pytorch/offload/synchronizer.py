"""The schedule on which each layer's saved tensors are copied to the host and back.

`DefaultOffloadSynchronizer` has n layers; the first k are offloaded. Layer i

* begins to be copied when the forward of layer i + 1 begins,
* leaves the device when the forward of layer n - k + i begins,
* begins to be copied back when the backward of layer n - 1 - k + i begins,
* is released when the backward of the layer before it begins,

so that saved tensors of at most n - k layers are on the device at any time. With n = 4, k = 2:

| pass | events |
| --- | --- |
| forward of 1 | the copy of 0 begins |
| forward of 2 | the copy of 1 begins, 0 leaves |
| forward of 3 | 1 leaves |
| backward of 2 | the copy of 1 back begins |
| backward of 1 | the copy of 0 back begins |

These are the times at which the host queues copies, ahead of the device. On the device, a copy starts when
the values of the tensor are complete, and its backward waits for this tensor alone (`marks`).

A `ManualOffloadSynchronizer` copies when its methods are called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checks import suggests_keywords, switch, whole
from .layer_state import NOT_OFFLOADED, OFFLOAD_FINISHED, OFFLOAD_STARTED, OffloadableLayerState
from .link import CudaLink, Link, NoLink


class Pushed(NamedTuple):
    """The object that autograd saves instead of a tensor."""

    layer: int
    generation: int
    value: Any


class _Begun(NamedTuple):
    """The last layer whose backward has begun.

    Args:
        layer: Layer number.
        generation: Generation of its saved tensors, which a later forward replaces.
        graph_pass: Autograd's backward pass number, -1 outside one.
    """

    layer: int
    generation: int
    graph_pass: int


class OffloadSynchronizer:
    """Saved tensors for num_layers layers, each called once per step, in the same order every time.

    Autograd does not report a backward pass that raises. So every start of a layer's backward
    carries the generation of its forward, and its pass. Only tensors with the same generation are
    released, and only by the pass that read them. Tensors from a newer forward, and from a layer in
    which a pass failed, stay until the next step begins.

    Args:
        num_layers: Layers per step.
        retain_pinned_cpu_buffers: Reuse pinned host memory in the next step, whose tensors must have the same shapes.
        offload_stream: CUDA copy stream; None creates one.
        link: Copies between device and host; None chooses by the machine.
    """

    @suggests_keywords
    def __init__(
        self,
        num_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: Any = None,
        *,
        link: Link | None = None,
    ):
        whole("num_layers", num_layers)
        switch("retain_pinned_cpu_buffers", retain_pinned_cpu_buffers)
        if link is None:
            link = CudaLink(offload_stream) if torch.cuda.is_available() else NoLink()
        self.link = link
        self.offload_stream = getattr(link, "stream", offload_stream)
        self.num_layers = num_layers
        self.layer_states = {
            layer: OffloadableLayerState(self.offload_stream, retain_pinned_cpu_buffers, link=link)
            for layer in range(num_layers)
        }
        self.num_of_fwds: int | None = None
        self.current_layer_id = 0
        self._pushing = 0
        self._begun: _Begun | None = None

    @property
    def previous_bwd_layer_id(self) -> int | None:
        """The layer whose backward has begun last in the present backward pass, if any."""
        return None if self._begun is None else self._begun.layer

    def fwd_step(self) -> int:
        """Begin the forward of the next layer and return its number; after the last layer, a new step begins."""
        if self.num_of_fwds is None or self.num_of_fwds == self.num_layers - 1:
            # Release the tensors of all layers, including a step that had no backward pass.
            self._begun = None
            for state in self.layer_states.values():
                state.release_all_memory()
            self.num_of_fwds = 0
        else:
            self.num_of_fwds += 1
        self.current_layer_id = self._pushing = self.num_of_fwds
        return self.current_layer_id

    def bwd_step(self, layer_num: int, generation: int | None = None) -> bool:
        """Begin the backward of a layer, and release the tensors of the layer whose backward ran before it.

        Args:
            layer_num: Layer number.
            generation: The layer's forward generation; None for the last one.

        Returns:
            False for the backward of an earlier forward, which changes nothing.
        """
        present = self.layer_states[layer_num].generation
        if generation is not None and generation != present:
            return False
        graph_pass = torch._C._current_graph_task_id()  # -1 outside a backward pass
        if self._begun is not None and self._begun.graph_pass == graph_pass:
            self._forget_previous()
        self._begun = _Begun(layer_num, self.layer_states[layer_num].generation, graph_pass)
        self.current_layer_id = layer_num
        return True

    def finish_part_of_bwd(self) -> None:
        """End a backward pass: release the tensors of its last layer."""
        self._forget_previous()
        self._begun = None

    def push_tensor(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves instead of a tensor of the layer in its forward."""
        state = self.layer_states[self._pushing]
        pushed = state.push_tensor(tensor)
        return tensor if pushed is tensor else Pushed(self._pushing, state.generation, pushed)

    def pop_tensor(self, tensor_or_tensor_id: Any) -> Tensor:
        """Return the saved tensor; raise RuntimeError if a later layer forward has replaced it."""
        if isinstance(tensor_or_tensor_id, Tensor):
            return tensor_or_tensor_id
        state = self.layer_states[tensor_or_tensor_id.layer]
        if state.generation != tensor_or_tensor_id.generation:
            raise RuntimeError(
                f"the saved tensors of layer {tensor_or_tensor_id.layer} are gone: its forward has run again, or its "
                "backward has run before; run one backward after each forward of the offloaded layers, without "
                "retain_graph=True"
            )
        if state.state == OFFLOAD_FINISHED:  # a backward in another order than the forward's
            state.start_reload()
        return state.pop_tensor(tensor_or_tensor_id.value)

    def get_offloaded_total_size_mb(self) -> float:
        """Return the size in MiB of all layers in host memory."""
        return sum(state.get_offloaded_total_size_mb() for state in self.layer_states.values())

    def _forget_previous(self) -> None:
        if (
            self._begun is not None
            and self.layer_states[self._begun.layer].generation == self._begun.generation
        ):
            self.layer_states[self._begun.layer].release_all_memory()


class DefaultOffloadSynchronizer(OffloadSynchronizer):
    """Offloads the layers 0 to num_offloaded_layers - 1 while other layers compute.

    The copy of layer i begins with the forward of layer i + 1. With n layers and k offloaded, it leaves the
    device when the forward of layer n - k + i begins, and its copy back begins with the backward of layer n -
    1 - k + i. Saved tensors of at most n - k layers are on the device at any time.

    Args:
        num_offloaded_layers: Leading layers that are offloaded; None is all but the last layer,
            which always stays.
    """

    def __init__(
        self,
        num_layers: int,
        num_offloaded_layers: int | None = None,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: Any = None,
        *,
        link: Link | None = None,
    ):
        super().__init__(num_layers, retain_pinned_cpu_buffers, offload_stream, link=link)
        offloaded = num_layers - 1 if num_offloaded_layers is None else num_offloaded_layers
        whole("num_offloaded_layers", offloaded, 0)
        if offloaded > max(num_layers - 1, 0):
            raise ValueError(
                f"num_offloaded_layers={offloaded} > {num_layers - 1}: the backward begins with the last of "
                f"{num_layers} layers, which stays; offload fewer"
            )
        self.num_offloaded_layers = offloaded
        # {the layer whose forward, or backward, begins: the layer whose copies start or end}
        self.offload_layer_map = {layer + 1: layer for layer in range(offloaded)}
        self.finish_offload_map = {
            num_layers - offloaded + layer: layer for layer in range(offloaded)
        }
        self.start_reload_map = {
            num_layers - 1 - offloaded + layer: layer for layer in range(offloaded)
        }

    def fwd_step(self) -> int:
        layer = super().fwd_step()
        begun = self.offload_layer_map.get(layer)
        if begun is not None:
            self.layer_states[begun].start_offload()
        left = self.finish_offload_map.get(layer)
        if left is not None:
            self.layer_states[left].release_activation_forward_gpu_memory()
        return layer

    def bwd_step(self, layer_num: int, generation: int | None = None) -> bool:
        if not super().bwd_step(layer_num, generation):
            return False
        back = self.start_reload_map.get(layer_num)
        if back is None:
            return True
        state = self.layer_states[back]
        if state.state == OFFLOAD_STARTED:  # a forward that ended before its last layer
            state.release_activation_forward_gpu_memory()
        if state.state == OFFLOAD_FINISHED:
            state.start_reload()
        return True

    def push_tensor(self, tensor: Tensor) -> Any:
        if self._pushing >= self.num_offloaded_layers:
            return tensor
        return super().push_tensor(tensor)


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """Offloads layers only when its methods are called.

    Args:
        num_layers: Layers per step.
        retain_pinned_cpu_buffers: Keep the host buffers from step to step, which CUDA graphs need.
        offload_stream: Copy stream, by default a new one.
        link: Copies between device and host; by default the device's.
    """

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to copy a layer's saved tensors to the host, after its forward."""
        self._state(layer_id, "start_offload_layer", NOT_OFFLOADED).start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Make the computation wait for the copies, and free the layer's memory on the device."""
        state = self._state(layer_id, "release_activation_forward_gpu_memory", OFFLOAD_STARTED)
        state.release_activation_forward_gpu_memory()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to copy the layer's tensors back, before its backward."""
        self._state(layer_id, "start_reload_layer", OFFLOAD_FINISHED).start_reload()

    def _state(self, layer: Any, step: str, prerequisite: str) -> OffloadableLayerState:
        whole("layer_id", layer, 0)
        if layer >= self.num_layers:
            raise ValueError(f"layer_id={layer}; there are layers 0 to {self.num_layers - 1}")
        state = self.layer_states[layer]
        if state.state != prerequisite:
            raise RuntimeError(
                f"Invalid state: {step}({layer}) finds the layer {state.state}, not {prerequisite}; call "
                "start_offload_layer, release_activation_forward_gpu_memory and start_reload_layer in this order"
            )
        return state

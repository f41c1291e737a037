"""States of one layer's saved tensors: on the device, being copied, on the host, being copied back.

```text
not_offloaded --start_offload--> offload_started --release_activation_forward_gpu_memory--> offload_finished
      ^                                                                                            |
      +------------release_all_memory------------ reload_started <------------start_reload---------+
```

A tensor that is saved several times, or in several views of the same memory, is copied once. Tensors are copied in the
order in which their values became available, and are copied back in the opposite order, in which a backward reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.checks import switch
from ..tensor.quantized_tensor import QuantizedTensor
from .link import CudaLink, Link, NoLink
from .marks import READ_LATE, defer_wait, dense_memory, moves, ready_moment

NOT_OFFLOADED, OFFLOAD_STARTED = "not_offloaded", "offload_started"
OFFLOAD_FINISHED, RELOAD_STARTED = "offload_finished", "reload_started"
_MEBIBYTE = 1 << 20


@dataclass
class TensorGroup:
    """Tensors by number, and for each the moment at which its values are available."""

    tensor_list: list[Tensor] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _View:
    """Layout of a saved tensor as a view of the copied tensor with that number.

    Attributes:
        number: Number of the copied tensor.
        shape: Shape of the view.
        stride: Strides of the view.
        offset: Storage offset of the view.
        read_late: Whether the tensor has the mark READ_LATE; see `marks`.
    """

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    read_late: bool

    def of(self, full: Tensor) -> Tensor:
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.offset)


@dataclass(frozen=True)
class _SavedQuantized:
    """A saved quantized tensor: its saved parts, and the function that rebuilds it."""

    parts: tuple[Any, ...]
    rebuild: Any
    kind: type[QuantizedTensor]
    shape: torch.Size


class OffloadableLayerState:
    """One layer's saved tensors: on the device, being copied to the host, on the host, or being copied back.

    `state` is "not_offloaded", "offload_started", "offload_finished" or "reload_started". `start_offload`,
    `release_activation_forward_gpu_memory`, `start_reload` and `release_all_memory` lead from each state to the next;
    in another state a method raises RuntimeError.

    Args:
        offload_stream: CUDA copy stream; None creates one.
        retain_pinned_cpu_buffers: Reuse the layer's host buffers in the next step, whose tensors
            must have the same shapes. Otherwise buffers with matching shapes are reused: PyTorch's
            pinned-memory cache reuses a buffer only after the GPU has finished with it, so a host
            several steps ahead would pin new memory in each step, for milliseconds.
        link: Copies between device and host; None chooses by the machine.
    """

    def __init__(
        self,
        offload_stream: Any = None,
        retain_pinned_cpu_buffers: bool = False,
        *,
        link: Link | None = None,
    ):
        switch("retain_pinned_cpu_buffers", retain_pinned_cpu_buffers)
        if link is None:
            link = CudaLink(offload_stream) if torch.cuda.is_available() else NoLink()
        self.link = link
        self.offload_stream = offload_stream
        self.retain_pinned_cpu_buffers = retain_pinned_cpu_buffers
        self.state = NOT_OFFLOADED
        self.generation = 0
        self.fwd_gpu_tensor_group = TensorGroup()
        self.cpu_tensor_group = TensorGroup()
        self.bwd_gpu_tensor_group = TensorGroup()
        self._views: list[_View] = []
        self._wholes: dict[tuple[Any, ...], int] = {}
        self._devices: list[torch.device] = []
        self._unread: set[int] = set()
        self._spare: list[Tensor] = []
        self._coming_back: list[int] = []

    def push_tensor(self, tensor: Tensor) -> Any:
        """Return the object to save for a tensor: a number, a quantized tensor's numbers, or a tensor that stays."""
        self._demand(NOT_OFFLOADED)
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        if isinstance(tensor, QuantizedTensor):
            parts, rebuild = tensor.as_storage().flatten()
            pushed = tuple(None if part is None else self._push(part) for part in parts)
            return _SavedQuantized(pushed, rebuild, type(tensor), tensor.shape)
        return self._push(tensor)

    def _push(self, tensor: Tensor) -> Tensor | int:
        if not self.link.takes(tensor) or not moves(tensor):
            return tensor
        memory = dense_memory(tensor)
        if memory is None:
            return tensor
        # The group holds the tensor, so that no other tensor can reuse its storage and match the key.
        key = (
            memory.untyped_storage()._cdata,
            memory.storage_offset(),
            memory.numel(),
            memory.dtype,
        )
        number = self._wholes.get(key)
        if number is None:
            number = self._wholes[key] = len(self.fwd_gpu_tensor_group.tensor_list)
            self.fwd_gpu_tensor_group.tensor_list.append(memory)
            self.fwd_gpu_tensor_group.events.append(ready_moment(tensor, self.link))
            self._devices.append(memory.device)
        offset = int(tensor.storage_offset()) - int(memory.storage_offset())
        read_late = getattr(tensor, READ_LATE, False)
        self._views.append(_View(number, tensor.shape, tensor.stride(), offset, read_late))
        return len(self._views) - 1

    def pop_tensor(self, tensor_or_tensor_id: Any) -> Tensor:
        """Return the saved tensor for a `push_tensor` result; the computation waits for its values."""
        if isinstance(tensor_or_tensor_id, _SavedQuantized):
            parts = [
                None if part is None else self.pop_tensor(part)
                for part in tensor_or_tensor_id.parts
            ]
            return tensor_or_tensor_id.kind.from_storage(
                tensor_or_tensor_id.rebuild(parts), shape=tensor_or_tensor_id.shape
            )
        if isinstance(tensor_or_tensor_id, Tensor):
            return tensor_or_tensor_id
        self._demand(NOT_OFFLOADED, OFFLOAD_STARTED, RELOAD_STARTED)
        view = self._views[tensor_or_tensor_id]
        if self.state != RELOAD_STARTED:
            return view.of(self.fwd_gpu_tensor_group.tensor_list[view.number])
        tensor = view.of(self.bwd_gpu_tensor_group.tensor_list[view.number])
        if not (
            view.read_late
            and defer_wait(tensor, partial(self._await_tensor, view.number, self.generation))
        ):
            self._await_tensor(view.number, self.generation)
        return tensor

    def _await_tensor(self, number: int, generation: int) -> None:
        """Make the computation wait for a tensor; `release_all_memory` has waited for earlier generations."""
        if generation == self.generation:
            self.link.wait(self.bwd_gpu_tensor_group.events[number])
            self._unread.discard(number)

    def start_offload(self) -> None:
        """Begin to copy every tensor to the host; they stay on the device until they are released."""
        self._demand(NOT_OFFLOADED)
        # One buffer per tensor, from the last step if retained.
        group = self.fwd_gpu_tensor_group
        tensors, buffers = group.tensor_list, self.cpu_tensor_group.tensor_list
        if not self.retain_pinned_cpu_buffers or not buffers:
            spare, self._spare = self._spare, []
            host = [
                spare[number]
                if number < len(spare) and _fits(spare[number], values)
                else self.link.buffer(values)
                for number, values in enumerate(tensors)
            ]
        elif len(buffers) != len(tensors) or not all(map(_fits, buffers, tensors)):
            raise ValueError(
                f"retain_pinned_cpu_buffers=True: a layer saved {_extents(buffers)} and now saves {_extents(tensors)}; "
                "keep shapes and types from step to step, or set it to False"
            )
        else:
            host = buffers
        events: list[Any] = [None] * len(host)
        for number in self._order_by_readiness():
            events[number] = self.link.to_host(
                group.tensor_list[number], host[number], group.events[number]
            )
        self.cpu_tensor_group = TensorGroup(host, events)
        self.state = OFFLOAD_STARTED

    def _order_by_readiness(self) -> list[int]:
        """Return the tensor numbers in the order in which their values became available."""
        moments = self.fwd_gpu_tensor_group.events
        return sorted(range(len(moments)), key=moments.__getitem__)

    def release_activation_forward_gpu_memory(self) -> None:
        """Free the device's tensors, once they are copied."""
        self._demand(OFFLOAD_STARTED)
        for event in self.cpu_tensor_group.events:
            self.link.wait(event)
        self._coming_back = self._order_by_readiness()[::-1]
        self.fwd_gpu_tensor_group = TensorGroup()
        self.state = OFFLOAD_FINISHED

    def start_reload(self) -> None:
        """Begin to copy every tensor back, into new device memory."""
        self._demand(OFFLOAD_FINISHED)
        host = self.cpu_tensor_group.tensor_list
        tensors: list[Any] = [None] * len(host)
        events: list[Any] = [None] * len(host)
        for number in self._coming_back:
            tensors[number], events[number] = self.link.to_device(
                host[number], self._devices[number]
            )
        self.bwd_gpu_tensor_group = TensorGroup(tensors, events)
        self._unread = set(self._coming_back)
        self.state = RELOAD_STARTED

    def release_all_memory(self) -> None:
        """Release everything except reusable host buffers; `push_tensor` results become invalid."""
        # a copy without a wait may still be writing memory that is freed here
        for number in self._unread:
            self.link.wait(self.bwd_gpu_tensor_group.events[number])
        self._unread = set()
        self.fwd_gpu_tensor_group = TensorGroup()
        self.bwd_gpu_tensor_group = TensorGroup()
        if not self.retain_pinned_cpu_buffers:
            self._spare = self.cpu_tensor_group.tensor_list or self._spare
            self.cpu_tensor_group = TensorGroup()
        self._views, self._wholes, self._devices = [], {}, []
        self.generation += 1
        self.state = NOT_OFFLOADED

    def get_offloaded_total_size_mb(self) -> float:
        """Return how many MiB of the layer are in host memory, or are being copied there."""
        if self.state == NOT_OFFLOADED:
            return 0.0
        return sum(values.nbytes for values in self.cpu_tensor_group.tensor_list) / _MEBIBYTE

    def _demand(self, *states: str) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"Invalid state: {self.state}, but this is a step from {' or '.join(states)}; call start_offload, "
                "release_activation_forward_gpu_memory, start_reload and release_all_memory in this order"
            )


def _fits(buffer: Tensor, values: Tensor) -> bool:
    return buffer.shape == values.shape and buffer.dtype == values.dtype


def _extents(tensors: list[Tensor]) -> str:
    return ", ".join(f"{values.numel()} of {values.dtype}" for values in tensors)

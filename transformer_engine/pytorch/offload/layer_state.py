"""The saved tensors of one layer on their way: on the device, being copied, on the host, being copied back.

    not_offloaded --start_offload--> offload_started --release_activation_forward_gpu_memory--> offload_finished
          ^                                                                                            |
          +------------release_all_memory------------ reload_started <------------start_reload---------+

A tensor that is saved several times, or in several views of the same memory, is copied once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...common.checks import switch
from ..tensor.quantized_tensor import QuantizedTensor
from .link import CudaLink, Link, NoLink
from .marks import READY, moves, whole_of

NOT_OFFLOADED, OFFLOAD_STARTED = "not_offloaded", "offload_started"
OFFLOAD_FINISHED, RELOAD_STARTED = "offload_finished", "reload_started"
_MEBIBYTE = 1 << 20


@dataclass
class TensorGroup:
    """Tensors in the order of their numbers, and for each the moment at which its values are there."""

    tensor_list: list[Tensor] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _View:
    """How a saved tensor lies in the copied one of that number."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Quantized:
    """What stands for a quantized tensor: for each of its parts, and how they are put together again."""

    parts: tuple[Any, ...]
    rebuild: Any
    kind: type[QuantizedTensor]
    shape: torch.Size

    def of(self, parts: list[Any]) -> QuantizedTensor:
        return self.kind.from_storage(self.rebuild(parts), shape=self.shape)


class OffloadableLayerState:
    """One layer's saved tensors. Each method raises RuntimeError where the drawing above has no such arrow.

    offload_stream              the stream to copy on
    retain_pinned_cpu_buffers   use the host's buffers again in the next step, whose tensors must have the same shapes
    """

    def __init__(
        self, offload_stream: Any = None, retain_pinned_cpu_buffers: bool = False, *, link: Link | None = None
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

    def push_tensor(self, tensor: Tensor) -> Any:
        """What stands for a saved tensor: a number, or the like of a quantized one; the tensor itself if it stays."""
        self._demand(NOT_OFFLOADED)
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        if isinstance(tensor, QuantizedTensor):
            parts, rebuild = tensor.as_storage().flatten()
            pushed = tuple(None if part is None else self._push(part) for part in parts)
            return _Quantized(pushed, rebuild, type(tensor), tensor.shape)
        return self._push(tensor)

    def _push(self, tensor: Tensor) -> Tensor | int:
        if not self.link.takes(tensor) or not moves(tensor):
            return tensor
        whole = whole_of(tensor)
        if whole is None:
            return tensor
        # The group holds the tensor, so that no other one can have its storage and be taken for it.
        key = (whole.untyped_storage()._cdata, whole.storage_offset(), whole.numel(), whole.dtype)
        number = self._wholes.get(key)
        if number is None:
            number = self._wholes[key] = len(self.fwd_gpu_tensor_group.tensor_list)
            self.fwd_gpu_tensor_group.tensor_list.append(whole)
            self.fwd_gpu_tensor_group.events.append(getattr(tensor, READY, None))
            self._devices.append(whole.device)
        offset = int(tensor.storage_offset()) - int(whole.storage_offset())
        self._views.append(_View(number, tensor.shape, tensor.stride(), offset))
        return len(self._views) - 1

    def pop_tensor(self, pushed: Any) -> Tensor:
        """The saved tensor that `push_tensor` answered this for; the computation waits until it is there."""
        if isinstance(pushed, _Quantized):
            return pushed.of([None if part is None else self.pop_tensor(part) for part in pushed.parts])
        if isinstance(pushed, Tensor):
            return pushed
        self._demand(NOT_OFFLOADED, OFFLOAD_STARTED, RELOAD_STARTED)
        view = self._views[pushed]
        if self.state != RELOAD_STARTED:
            return view.of(self.fwd_gpu_tensor_group.tensor_list[view.number])
        self.link.wait(self.bwd_gpu_tensor_group.events[view.number])
        self._unread.discard(view.number)
        return view.of(self.bwd_gpu_tensor_group.tensor_list[view.number])

    def start_offload(self) -> None:
        """Begin to copy every tensor to the host; they stay on the device until they are released."""
        self._demand(NOT_OFFLOADED)
        here = self.link.mark() if self.fwd_gpu_tensor_group.tensor_list else None
        host = self._host_buffers()
        events = [
            self.link.to_host(values, buffer, here if ready is None else ready)
            for values, ready, buffer in zip(
                self.fwd_gpu_tensor_group.tensor_list, self.fwd_gpu_tensor_group.events, host, strict=True
            )
        ]
        self.cpu_tensor_group = TensorGroup(host, events)
        self.state = OFFLOAD_STARTED

    def _host_buffers(self) -> list[Tensor]:
        """A buffer a tensor: the last step's where those are retained; ValueError where one does not fit."""
        tensors, kept = self.fwd_gpu_tensor_group.tensor_list, self.cpu_tensor_group.tensor_list
        if not self.retain_pinned_cpu_buffers or not kept:
            return [self.link.buffer(values) for values in tensors]
        if len(kept) != len(tensors) or any(
            (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(kept, tensors, strict=True)
        ):
            raise ValueError(
                f"retain_pinned_cpu_buffers=True: a layer saved {_extents(kept)} and now saves {_extents(tensors)}; "
                "keep shapes and types from step to step, or set it to False"
            )
        return kept

    def release_activation_forward_gpu_memory(self) -> None:
        """Free the device's tensors, once they are copied."""
        self._demand(OFFLOAD_STARTED)
        for event in self.cpu_tensor_group.events:
            self.link.wait(event)
        self.fwd_gpu_tensor_group = TensorGroup()
        self.state = OFFLOAD_FINISHED

    def start_reload(self) -> None:
        """Begin to copy every tensor back, into new memory of the device."""
        self._demand(OFFLOAD_FINISHED)
        group = TensorGroup()
        for buffer, device in zip(self.cpu_tensor_group.tensor_list, self._devices, strict=True):
            values, event = self.link.to_device(buffer, device)
            group.tensor_list.append(values)
            group.events.append(event)
        self.bwd_gpu_tensor_group = group
        self._unread = set(range(len(group.tensor_list)))
        self.state = RELOAD_STARTED

    def release_all_memory(self) -> None:
        """Forget everything but the host's buffers that are to be used again; what was pushed is of no use any more."""
        for number in self._unread:  # a copy that nobody waited for may still be writing memory that goes now
            self.link.wait(self.bwd_gpu_tensor_group.events[number])
        self._unread = set()
        self.fwd_gpu_tensor_group = TensorGroup()
        self.bwd_gpu_tensor_group = TensorGroup()
        if not self.retain_pinned_cpu_buffers:
            self.cpu_tensor_group = TensorGroup()
        self._views, self._wholes, self._devices = [], {}, []
        self.generation += 1
        self.state = NOT_OFFLOADED

    def get_offloaded_total_size_mb(self) -> float:
        """MiB of the layer that are, or are about to be, in host memory."""
        if self.state == NOT_OFFLOADED:
            return 0.0
        return sum(values.nbytes for values in self.cpu_tensor_group.tensor_list) / _MEBIBYTE

    def _demand(self, *states: str) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"Invalid state: {self.state}, but this is a step from {' or '.join(states)}; call start_offload, "
                "release_activation_forward_gpu_memory, start_reload and release_all_memory in this order"
            )


def _extents(tensors: list[Tensor]) -> str:
    return ", ".join(f"{values.numel()} of {values.dtype}" for values in tensors)

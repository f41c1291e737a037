"""DeviceTables: small tensors on a device that kernels read, cached by the numbers that they contain.

A stream must not read a table that another stream still fills, and the memory of an evicted table
may be reused by the stream that allocated it. Every stream therefore has its own tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .capture import is_capturing

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class DeviceTables(Generic[K, V]):
    """Values cached by key and stream; the oldest are evicted, except values that a captured graph reads.

    Args:
        build: build(key) -> the value, on the device for which it is requested.
        most: Maximum value count that no captured graph reads.
    """

    def __init__(self, build: Callable[[K], V], most: int):
        self._build = build
        self._most = most
        self._values: OrderedDict[tuple[K, int], V] = OrderedDict()
        # Every replay reads these values, and the lifetime of the graph is unknown.
        self._captured: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, device: torch.device) -> V | None:
        """Return the value of a key; None if a graph is being captured and no earlier call has built the value.

        A capture cannot copy numbers from the host. It begins with a synchronization, so that it
        may read the tables of every stream.
        """
        entry = (key, stream_handle(device))
        value = self._values.get(entry)
        if is_capturing(device):
            return self._find_captured(key, value)
        if value is None:
            value = self._values[entry] = self._build(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)
        return value

    def _find_captured(self, key: K, value: V | None) -> V | None:
        if key in self._captured:
            return self._captured[key]
        if value is None:
            value = next(
                (other for (other_key, _), other in self._values.items() if other_key == key), None
            )
        if value is not None:
            self._captured[key] = value
        return value


def stream_handle(device: torch.device) -> int:
    """Return the handle for the device's current stream; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


_read_by_graphs: dict[int, Any] = {}


def keep_if_captured(value: V, device: torch.device) -> V:
    """Return a cached value, and keep it alive if a graph that reads it is being captured on the device."""
    if is_capturing(device):
        _read_by_graphs[id(value)] = value
    return value


def get_cached_ones_tensor(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an all-ones tensor [num_elements], the same object for the same arguments and stream; do not write to it.

    During a capture without an earlier call, the graph gets a separate tensor, which each replay fills.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # another GPU has another tensor
    key = num_elements, dtype, device
    ones = _ONES.get(key, device)
    return _make_ones(key) if ones is None else ones


def _make_ones(key: tuple[int, torch.dtype, torch.device]) -> Tensor:
    num_elements, dtype, device = key
    with torch.inference_mode(False):  # later calls may save the tensor for a backward pass
        return torch.ones(num_elements, dtype=dtype, device=device)


_ONES = DeviceTables(_make_ones, 64)

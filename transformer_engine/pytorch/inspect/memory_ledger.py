"""Ledger: allocations and deallocations in a fake-tensor run, in order.

Fake tensors have a shape, a dtype and a device but no storage. Garbage collection frees them, so their
lifetimes match a real run. torch operations also allocate scratch memory: a CUDA sum over the leading axes of
a matrix [rows, columns] splits rows over thread blocks, and every thread stores its partial sums in global
memory, 128 MiB for bfloat16 4096 x 4096. The split follows torch's Reduce.cuh (setReduceConfig).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...common.formats import ceil_div
from ..tensor.quantized_tensor import QuantizedTensorStorage

GRANULE = 512  # bytes; torch's CUDA allocator rounds sizes up to a multiple


class Ledger(TorchDispatchMode):
    """Dispatch mode that numbers storages in allocation order.

    Attributes:
        scratch: `scratch(operation, arguments)` returns the scratch memory of a torch operation in bytes.
        sizes: Storage bytes, by number.
        places: Result from `place()` when each storage was allocated.
        events: (number, allocated or freed) in order.
    """

    def __init__(
        self, location: Callable[[], str], scratch: Callable[[Any, Any], int] = lambda *_: 0
    ):
        super().__init__()
        self.place = location
        self.scratch = scratch
        self.sizes: dict[int, int] = {}
        self.places: dict[int, str] = {}
        self.events: list[tuple[int, bool]] = []
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._count = itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        scratch_bytes = self.scratch(func, args)
        if scratch_bytes:
            number = self._new(scratch_bytes)
            self.events.append((number, False))
        return result

    def number(self, tensor: Tensor) -> int:
        """Return a tensor's storage number, which views share."""
        storage = tensor.untyped_storage()
        cached = self._numbers.get(storage)
        if cached is not None:
            return cached
        number = self._numbers[storage] = self._new(storage.nbytes())
        weakref.finalize(storage, self.events.append, (number, False)).atexit = False
        return number

    def _new(self, size: int) -> int:
        number = next(self._count)
        self.sizes[number] = -(-size // GRANULE) * GRANULE
        self.places[number] = self.place()
        self.events.append((number, True))
        return number

    def numbers(self, tensors: Iterable[Tensor | None]) -> set[int]:
        """Return the tensors' storage numbers; a quantized tensor has one for each part."""
        return {self.number(part) for tensor in tensors for part in _parts(tensor)}

    def live(self, until: int | None = None) -> set[int]:
        """Return the storages that exist after `until` events (default: after all)."""
        storages: set[int] = set()
        for number, allocated in self.events[:until]:
            (storages.add if allocated else storages.discard)(number)
        return storages

    def peak(self, start: int) -> int:
        """Return the event count at the peak allocated bytes, searching from event `start`."""
        total = self.bytes(self.live(start))
        most, where = total, start
        for index, (number, allocated) in enumerate(self.events[start:], start + 1):
            total += self.sizes[number] if allocated else -self.sizes[number]
            if total > most:
                most, where = total, index
        return where

    def bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[number] for number in numbers)


def _parts(tensor: Tensor | None) -> Iterable[Tensor]:
    if isinstance(tensor, QuantizedTensorStorage):
        return (part for part in tensor.as_storage().flatten()[0] if part is not None)
    return () if tensor is None else (tensor,)


_THREADS = 512  # maximum threads per block
_RESIDENT = 2048  # maximum threads per multiprocessor
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # values that one thread sums


def scratch_bytes(operation: Any, arguments: Any, processors: int) -> int:
    """Return the scratch bytes of a torch operation on a GPU with `processors` multiprocessors; 0 except for sums."""
    if operation is not torch.ops.aten.sum.dim_IntList:
        return 0
    x, axes = arguments[0], arguments[1]
    if not isinstance(x, Tensor) or not x.is_contiguous() or x.dtype == torch.float64:
        return 0
    count = len(axes)
    if not 0 < count < x.dim() or sorted(axis % x.dim() for axis in axes) != list(range(count)):
        return 0
    return sum_over_rows(prod(x.shape[:count]), prod(x.shape[count:]), processors)


def sum_over_rows(rows: int, columns: int, processors: int) -> int:
    """Return the bytes of float32 partial sums for [rows, columns] -> [columns]; 0 if one block sums whole columns."""
    if not rows or not columns:
        return 0
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = _THREADS // vector
    across = min(_power_of_two(columns // vector), most)
    width = min(across, _WARP)
    height = min(_power_of_two(rows), most // width)
    width = min(across, most // height)
    splits_rows = rows >= height * _FEWEST_VALUES or rows >= _MOST_VALUES
    values = ceil_div(rows, height) if splits_rows else rows
    blocks = ceil_div(columns // vector, width)
    target = processors * (_RESIDENT // (width * height))
    if not splits_rows or values < _MOST_VALUES or blocks > target:
        return 0
    shares = max(
        min(ceil_div(target, blocks), ceil_div(values, _FEWEST_VALUES)),
        ceil_div(values, _MOST_VALUES),
    )
    return 4 * columns * shares * width * vector if shares > 1 else 0


def _power_of_two(value: int) -> int:
    """Return the largest power of two that is at most value."""
    return 1 << (value.bit_length() - 1)

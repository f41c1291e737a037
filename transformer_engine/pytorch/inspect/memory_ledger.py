"""Ledger: every tensor that is allocated and freed while a piece of code runs, in order, without its memory.

The code runs on fake tensors, which have a shape, a dtype and a device but no storage. Garbage collection is what
frees a tensor, so the lifetimes are those of a run for real.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..tensor.quantized_tensor import QuantizedTensorStorage

GRANULE = 512  # bytes that torch's CUDA allocator rounds a tensor up to


class Ledger(TorchDispatchMode):
    """Numbers storages as they appear.

    scratch  bytes that an operation of torch takes for itself while it runs: scratch(operation, its arguments)
    sizes    bytes of each storage, by number
    places   where it was allocated: what `place` answered then
    events   (number, allocated or freed) in order
    """

    def __init__(self, place: Callable[[], str], scratch: Callable[[Any, Any], int] = lambda *_: 0):
        super().__init__()
        self.place = place
        self.scratch = scratch
        self.sizes: dict[int, int] = {}
        self.places: dict[int, str] = {}
        self.events: list[tuple[int, bool]] = []
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        taken = self.scratch(func, args)
        if taken:
            number = self._new(taken)
            self.events.append((number, False))
        return result

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; views of one storage share it."""
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage)
        if known is not None:
            return known
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
        """Of these tensors; a quantized one has a storage for each of its parts."""
        return {self.number(part) for tensor in tensors for part in _parts(tensor)}

    def live(self, until: int | None = None) -> set[int]:
        """The storages that exist after so many events (default: after all)."""
        found: set[int] = set()
        for number, allocated in self.events[:until]:
            (found.add if allocated else found.discard)(number)
        return found

    def peak(self, start: int) -> int:
        """How many events had happened when most bytes were allocated, those before start aside."""
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

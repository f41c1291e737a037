"""Tables of addresses: where every chunk of every tensor of parallel lists begins, kept while they stay there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
_Kind = tuple[
    tuple[int, ...], int, torch.device
]  # bytes of an element of each list, elements of a chunk, where
_ALIGNMENT = 16


class Chunks(NamedTuple):
    """Parallel lists of tensors in chunks.

    table     int64 [chunks, 1 + lists] on the device: the elements of a chunk, and its first address in each list
    aligned   every size and every address is a multiple of 16
    each      how many chunks each tensor has, int64 [n] on the device
    """

    table: Tensor
    aligned: bool
    each: Tensor

    @property
    def count(self) -> int:
        return self.table.shape[0]


class Extents:
    """How many elements the i-th tensors of parallel lists have; whoever steps the same lists again keeps it."""

    __slots__ = ("_last", "sizes")

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = tuple(sizes)
        self._last: tuple[_Kind, list[int], list[int], Chunks] | None = None

    def table_of(self, lists: Lists, kind: _Kind) -> Chunks | None:
        """The table that was kept last, if all tensors lie where they lay then."""
        if self._last is None or _all_lie_at is None:
            return None
        known, addresses, places, chunks = self._last
        tensors = [tensor for part in lists for tensor in part]
        lie_there = known == kind and len(tensors) == len(addresses)
        return chunks if lie_there and _all_lie_at(tensors, addresses, places) else None

    def keep(self, addresses: Sequence[Sequence[int]], kind: _Kind, chunks: Chunks) -> None:
        """This table belongs to these addresses."""
        flat = [address for part in addresses for address in part]
        self._last = (kind, flat, list(range(len(flat))), chunks)


# In torch's builds for CUDA: do these tensors lie at these addresses? Asked of all at once, it takes two thirds of the
# time that asking each for its address takes.
_all_lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

# Addresses, sizes and widths determine a table entirely, so a stale one is never found; the oldest are dropped.
_tables: OrderedDict[tuple[Any, ...], Chunks] = OrderedDict()
_KEPT = 64
# A captured graph reads its table at every replay, which may go on when the table has been dropped above.
_captured: dict[tuple[Any, ...], Chunks] = {}


def chunks_of(lists: Lists, extents: Extents, size: int) -> Chunks | None:
    """The lists in chunks of at most `size` elements.

    None where they are unknown while a CUDA graph is captured, which cannot take a table from the host.
    """
    device = lists[0][0].device
    kind = (tuple([tensors[0].element_size() for tensors in lists]), size, device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not capturing and (found := extents.table_of(lists, kind)) is not None:
        return found
    addresses = tuple([tuple(map(Tensor.data_ptr, tensors)) for tensors in lists])
    key = (addresses, extents.sizes, kind)
    found = _tables.get(key)
    if capturing:
        if found is not None:
            _captured[key] = found
        return found
    if found is None:
        found = _tables[key] = _made(addresses, extents.sizes, *kind)
        if len(_tables) > _KEPT:
            _tables.popitem(last=False)
    extents.keep(addresses, kind, found)
    return found


def _made(
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    size: int,
    device: torch.device,
) -> Chunks:
    bases = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    elements = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    each = (elements + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), each)
    first = torch.cumsum(each, 0) - each
    offset = (torch.arange(owner.numel(), device="cpu") - first[owner]) * size
    columns = [(elements[owner] - offset).clamp_(max=size)]
    columns += [base[owner] + offset * width for base, width in zip(bases, widths, strict=True)]
    aligned = not bool((bases % _ALIGNMENT).any() or (elements % _ALIGNMENT).any())
    return Chunks(_moved(torch.stack(columns, dim=1), device), aligned, _moved(each, device))


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, which the host does not wait for."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers

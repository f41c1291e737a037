"""Tables of addresses: where every chunk of every tensor of parallel lists begins, kept while they stay there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


# Addresses, sizes and widths determine a table entirely, so a stale one is never found; the oldest are dropped.
_tables: OrderedDict[tuple[Any, ...], Chunks] = OrderedDict()
_KEPT = 64
# A captured graph reads its table at every replay, which may go on when the table has been dropped above.
_captured: dict[tuple[Any, ...], Chunks] = {}


def chunks_of(lists: Sequence[Sequence[Tensor]], sizes: tuple[int, ...], size: int) -> Chunks | None:
    """The lists, whose i-th tensors have sizes[i] elements, in chunks of at most `size` elements.

    None where they are unknown while a CUDA graph is captured, which cannot take a table from the host.
    """
    device = lists[0][0].device
    addresses = tuple([tuple(map(Tensor.data_ptr, tensors)) for tensors in lists])
    widths = tuple([tensors[0].element_size() for tensors in lists])
    key = (addresses, sizes, widths, size, device)
    found = _tables.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if found is not None:
            _captured[key] = found
        return found
    if found is None:
        found = _tables[key] = _made(addresses, sizes, widths, size, device)
        if len(_tables) > _KEPT:
            _tables.popitem(last=False)
    return found


def _made(
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    size: int,
    device: torch.device,
) -> Chunks:
    bases = torch.tensor(addresses, dtype=torch.int64)
    elements = torch.tensor(sizes, dtype=torch.int64)
    each = (elements + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(sizes)), each)
    first = torch.cumsum(each, 0) - each
    offset = (torch.arange(owner.numel()) - first[owner]) * size
    columns = [(elements[owner] - offset).clamp_(max=size)]
    columns += [base[owner] + offset * width for base, width in zip(bases, widths, strict=True)]
    aligned = not bool((bases % _ALIGNMENT).any() or (elements % _ALIGNMENT).any())
    return Chunks(_moved(torch.stack(columns, dim=1), device), aligned, _moved(each, device))


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, which the host does not wait for."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers

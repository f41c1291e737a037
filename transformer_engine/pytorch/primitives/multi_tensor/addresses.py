"""Chunk address tables for parallel tensor lists, cached by these addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.capture import is_capturing
from ...runtime.device_tables import DeviceTables, stream_handle

Lists = Sequence[Sequence[Tensor]]
# Bytes per entry and elements per entry in each list, elements per chunk, device.
_Kind = tuple[tuple[int, ...], tuple[int, ...], int, torch.device]
_Key = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], _Kind]  # addresses by list, sizes, kind
_ALIGNMENT = 16


class ChunkTable(NamedTuple):
    """Parallel tensor lists in chunks.

    Attributes:
        table: int64 [chunks, 1 + lists] on the device: the elements of a chunk, and its first address in each list.
        aligned: Whether all sizes and addresses are multiples of 16.
        each: Chunks per tensor, int64 [n] on the device.
    """

    table: Tensor
    aligned: bool
    each: Tensor


class Extents:
    """Element counts of the i-th tensors in parallel lists, and the table of their last step."""

    __slots__ = ("last", "sizes")

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = tuple(sizes)
        # Kind and stream, addresses, their indices, table of the last call.
        self.last: tuple[tuple[_Kind, int], list[int], list[int], ChunkTable] | None = None

    def table_of(self, lists: Lists, kind: tuple[_Kind, int]) -> ChunkTable | None:
        """Return the table of the last call if its stream and all tensor addresses are unchanged."""
        if self.last is None or _addresses_equal is None:
            return None
        previous, addresses, places, chunks = self.last
        tensors = [tensor for part in lists for tensor in part]
        same = previous == kind and len(tensors) == len(addresses)
        return chunks if same and _addresses_equal(tensors, addresses, places) else None


# In torch's builds for CUDA: whether tensors have these addresses. One call for all takes two
# thirds of the time for one data_ptr() call each.
_addresses_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def chunk_table(
    lists: Lists, extents: Extents, size: int, entries: tuple[int, ...] | None = None
) -> ChunkTable | None:
    """Return the table for the lists in chunks with at most `size` elements.

    Returns None for unknown addresses during CUDA graph capture, which cannot copy a table from the host.

    Args:
        lists: Parallel tensor lists.
        extents: Element counts of the first list.
        size: Elements per chunk.
        entries: Elements of the first list per entry of each list, divisors of `size`; None: 1 for all lists.
    """
    device = lists[0][0].device
    widths = tuple([tensors[0].element_size() for tensors in lists])
    kind = (widths, entries or (1,) * len(lists), size, device)
    capturing, stream = is_capturing(device), stream_handle(device)
    if not capturing and (table := extents.table_of(lists, (kind, stream))) is not None:
        return table
    addresses = tuple([tuple(map(Tensor.data_ptr, tensors)) for tensors in lists])
    table = _tables.get((addresses, extents.sizes, kind), device)
    if not capturing and table is not None:
        flat = [address for part in addresses for address in part]
        extents.last = ((kind, stream), flat, list(range(len(flat))), table)
    return table


def _build_table(key: _Key) -> ChunkTable:
    addresses, sizes, (widths, entries, size, device) = key
    bases = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    elements = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    each = (elements + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), each)
    first = torch.cumsum(each, 0) - each
    offset = (torch.arange(owner.numel(), device="cpu") - first[owner]) * size
    columns = [(elements[owner] - offset).clamp_(max=size)]
    columns += [
        base[owner] + offset // per_entry * width
        for base, width, per_entry in zip(bases, widths, entries, strict=True)
    ]
    aligned = not bool((bases % _ALIGNMENT).any() or (elements % _ALIGNMENT).any())
    table = torch.stack(columns, dim=1)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
        each = each.pin_memory().to(device, non_blocking=True)
    return ChunkTable(table, aligned, each)


# Addresses, sizes and widths determine a table, so that an entry is never stale.
_tables: DeviceTables[_Key, ChunkTable] = DeviceTables(_build_table, 64)

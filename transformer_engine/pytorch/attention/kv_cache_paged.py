"""Keys and values in pages [pages, page size, heads, size] that sequences take and give back as they grow and end.

Memory is bound to the tokens that there are, not to the longest sequence times the batch, and a sequence that
changes its place in the batch moves one row of the page table instead of its keys and values (Kwon et al.,
Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.formats import ceil_div
from ..primitives.kv_cache import append
from .kv_cache import CacheShape, KVCacheManager


class PagedKVCacheManager(KVCacheManager):
    """page_table [max_batch, pages a sequence] int32: row i lists the pages of the i-th sequence of the batch.

    Entries behind a sequence's pages are 0, a page that exists, so that reading them does no harm.
    """

    def __init__(self, shape: CacheShape, total_pages: int, page_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.total_pages = total_pages
        self.page_size = page_size
        self.longest_step = shape.max_length
        columns = ceil_div(shape.max_length, page_size)
        self.page_table = torch.zeros(shape.max_batch, columns, dtype=torch.int32, device=shape.device)
        self._table = torch.zeros(shape.max_batch, columns, dtype=torch.int32)
        self._pages: dict[Any, list[int]] = {}
        self._free = list(range(total_pages - 1, -1, -1))  # taken from its end: the lowest page first

    def allocate_memory(self, layer_number: int) -> None:
        if layer_number not in self.cache:
            self.cache[layer_number] = self.shape.zeros(self.total_pages, self.page_size)

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        known, size = self.sequences, self.page_size
        totals = {sequence: known.get(sequence, 0) + new for sequence, new in step_dict.items()}
        counts = [-(-tokens // size) for tokens in totals.values()]
        if sum(counts) > self.total_pages:
            raise ValueError(
                f"the step's {len(step_dict)} sequences need {sum(counts)} pages of {size} tokens > "
                f"total_num_pages={self.total_pages}; end a sequence, leave one for later, or give more pages"
            )
        for sequence in known:
            if sequence not in totals:
                self._free.extend(reversed(self._pages.pop(sequence)))
        before = list(known)
        self.sequences = OrderedDict(totals)
        self.longest_step = max(step_dict.values(), default=0)
        first_changed = len(totals)
        for row, (sequence, count) in enumerate(zip(totals, counts, strict=True)):
            pages = self._pages.setdefault(sequence, [])
            if len(pages) == count and row < len(before) and before[row] == sequence:
                continue
            pages.extend(self._free.pop() for _ in range(count - len(pages)))
            first_changed = min(first_changed, row)
            self._table[row].zero_()
            self._table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        if first_changed < len(totals):
            changed = slice(first_changed, len(totals))
            # From memory that is not pinned: the copy is staged before the call returns, and waits for nothing.
            self.page_table[changed].copy_(self._table[changed], non_blocking=True)
        return self.sequences

    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return len(self._free)

    def reset(self) -> None:
        super().reset()
        self._pages.clear()
        self._free = list(range(self.total_pages - 1, -1, -1))

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        k, v = self.cache[layer_number]
        table = self.page_table[: cu_new_seqlens.shape[0] - 1]
        append(new_k, new_v, k, v, table, cu_new_seqlens, cu_cached_seqlens, qkv_format, self.longest_step)
        return k, v, table

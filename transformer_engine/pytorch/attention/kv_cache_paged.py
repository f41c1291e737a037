"""Keys and values in pages [pages, page size, heads, size] that sequences allocate and release as they grow and end.

The memory depends on the token count instead of the longest sequence times the batch. A sequence
that changes its position in the batch moves one page table row instead of its keys and values (Kwon
et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.formats import ceil_div
from ..primitives.kv_cache import append, check_append
from ..runtime.device import canonical_device
from .kv_cache import KVCacheManager, check_batch, check_layer, lasting_zeros, whole_step


class PagedKVCacheManager(KVCacheManager):
    """page_table [max_batch, pages per sequence] int32: row i lists the pages of the i-th sequence in the batch.

    Entries after a sequence's pages are 0, a valid page, so that reading them is harmless.
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        device: torch.device | str | int | None = "cuda",
    ) -> None:
        super().__init__()
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self.num_heads, self.dtype = num_heads, dtype
        self.head_dim_k, self.head_dim_v = (
            head_dim_k,
            head_dim_k if head_dim_v is None else head_dim_v,
        )
        self.device = canonical_device(device)
        self.longest_step = max_seqlen
        self.max_pages_per_seq = ceil_div(max_seqlen, page_size)
        table = (max_batch_size, self.max_pages_per_seq)
        self.page_table = lasting_zeros(*table, dtype=torch.int32, device=self.device)
        self._table = lasting_zeros(*table, dtype=torch.int32, device=torch.device("cpu"))
        self._pages: dict[Any, list[int]] = {}
        # used from its end: the lowest page first
        self._free = list(range(total_num_pages - 1, -1, -1))

    def allocate_memory(self, layer_number: int) -> None:
        if layer_number not in self.cache:
            options = {"dtype": self.dtype, "device": self.device}
            rows = (self.total_num_pages, self.page_size, self.num_heads)
            keys, values = (
                lasting_zeros(*rows, size, **options) for size in (self.head_dim_k, self.head_dim_v)
            )
            self.cache[layer_number] = (keys, values)

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        step_dict = whole_step(
            step_dict, self.sequences, self.max_batch_size, self.max_seqlen, self.max_seqlen
        )
        cached, size = self.sequences, self.page_size
        totals = {sequence: cached.get(sequence, 0) + new for sequence, new in step_dict.items()}
        counts = [-(-tokens // size) for tokens in totals.values()]
        if sum(counts) > self.total_num_pages:
            raise ValueError(
                f"the step's {len(step_dict)} sequences need {sum(counts)} pages of {size} tokens > "
                f"total_num_pages={self.total_num_pages}; end a sequence, leave one for later, or give more pages"
            )
        for sequence in cached:
            if sequence not in totals:
                self._free.extend(reversed(self._pages.pop(sequence)))
        before = list(cached)
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
            self._table[row, :count] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        if first_changed < len(totals):
            changed = slice(first_changed, len(totals))
            # The host memory is not pinned: the copy is staged before the call returns, and does not wait for the
            # device.
            self.page_table[changed].copy_(self._table[changed], non_blocking=True)
        return self.sequences

    def free_pages(self) -> int:
        """Count the pages that belong to no sequence."""
        return len(self._free)

    get_free_page_count = free_pages

    def has_free_page(self) -> bool:
        """Return whether there is a page that belongs to no sequence."""
        return bool(self._free)

    def get_page_list(self, seq: Any) -> list[int]:
        """Return the pages of a sequence in token order; raise ValueError for a sequence that is not in the batch."""
        if seq not in self._pages:
            raise ValueError(
                f"sequence {seq!r} is not in the batch, which has {list(self._pages)}; call pre_step"
            )
        return list(self._pages[seq])

    def get_page_table(self, sequences: Sequence[Any]) -> Tensor:
        """Return int32 [sequences, pages per sequence] on the cache's device: the pages per sequence, then 0."""
        rows = [self.get_page_list(sequence) for sequence in sequences]
        filled = [row + [0] * (self.max_pages_per_seq - len(row)) for row in rows]
        table = torch.tensor(filled, dtype=torch.int32, device=self.device)
        return table.reshape(len(rows), self.max_pages_per_seq)

    def described(self) -> list[str]:
        return [
            *super().described(),
            f"  {len(self._free)} of {self.total_num_pages} pages are free",
        ]

    def _find_place(self, sequence: Any) -> str:
        return f", pages {self._pages[sequence]}"

    def reset(self) -> None:
        super().reset()
        self._pages.clear()
        self._free = list(range(self.total_num_pages - 1, -1, -1))

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        check_layer(self.cache, layer_number)
        check_batch(self.sequences, cu_new_seqlens)
        k, v = self.cache[layer_number]
        table = self.page_table[: cu_new_seqlens.shape[0] - 1]
        lengths = (cu_new_seqlens, cu_cached_seqlens)
        check_append(new_k, k, table, *lengths, qkv_format, self.longest_step, own_table=True)
        append(
            new_k,
            new_v,
            k,
            v,
            table,
            cu_new_seqlens,
            cu_cached_seqlens,
            qkv_format,
            self.longest_step,
        )
        return k, v, table

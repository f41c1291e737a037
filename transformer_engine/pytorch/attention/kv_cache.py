"""Where the keys and values of earlier tokens are kept: one contiguous stretch a sequence, or pages.

A manager knows which sequences there are and how long they are, on the host. What a step changes on the device
(rows that move, page tables) is written in `pre_step`; `step` only starts kernels on tensors of fixed addresses, so
a CUDA graph can hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..primitives.kv_cache import append


@dataclass(frozen=True)
class CacheShape:
    """One layer's cache: keys [max_batch, max_length, heads, head_dim_k], values with head_dim_v."""

    max_batch: int
    max_length: int
    heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, tokens, heads, size]. A masked key counts 0 times its value: no NaN may lie there."""
        k, v = (
            torch.zeros(rows, tokens, self.heads, size, dtype=self.dtype, device=self.device)
            for size in (self.head_dim_k, self.head_dim_v)
        )
        return k, v


class KVCacheManager(ABC):
    """The caches of all layers: cache[layer] = (keys, values), and sequences {id: tokens} in batch order."""

    page_size = 0  # tokens a page; 0: no pages

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Any, int] = OrderedDict()

    @abstractmethod
    def allocate_memory(self, layer_number: int) -> None:
        """Make room for a layer; a second call for the same layer does nothing."""

    @abstractmethod
    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """The sequences {id: tokens with the new ones} of a step {id: new tokens}; others are forgotten.

        Raises ValueError, before anything changes, if they find no room.
        """

    @abstractmethod
    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(keys, values, page table) of the step's sequences, with the new tokens written behind the old.

        cu_new_seqlens, cu_cached_seqlens  int32 [b + 1]: cumulative new tokens, and tokens with the new ones
        """

    def reset(self) -> None:
        """Forget every sequence; the memory stays."""
        self.sequences.clear()

    def _advance(self, step_dict: Mapping[Any, int]) -> None:
        self.sequences = OrderedDict(
            (sequence, self.sequences.get(sequence, 0) + new) for sequence, new in step_dict.items()
        )


class NonPagedKVCacheManager(KVCacheManager):
    """Keys and values [max_batch, max_length, heads, size]; row i belongs to the i-th sequence of the batch.

    A sequence whose place in the batch changes is moved: keep the order where it can be kept.
    """

    def __init__(self, shape: CacheShape) -> None:
        super().__init__()
        self.shape = shape
        self.longest_step = shape.max_length

    def allocate_memory(self, layer_number: int) -> None:
        if layer_number not in self.cache:
            self.cache[layer_number] = self.shape.zeros(self.shape.max_batch, self.shape.max_length)

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        row = {sequence: index for index, sequence in enumerate(self.sequences)}
        self._move([(row[s], target) for target, s in enumerate(step_dict) if s in row and row[s] != target])
        self._advance(step_dict)
        self.longest_step = max(step_dict.values(), default=0)
        return self.sequences

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Row target becomes what row source was, for all (source, target) at once."""
        if not moves or not self.cache:
            return
        where = torch.tensor(moves).t().to(self.shape.device, non_blocking=True)
        longest = max(self.sequences.values())
        for pair in self.cache.values():
            for tensor in pair:
                used = tensor[:, :longest]
                used[where[1]] = used[where[0]]

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
        append(new_k, new_v, k, v, None, cu_new_seqlens, cu_cached_seqlens, qkv_format, self.longest_step)
        batch = cu_new_seqlens.shape[0] - 1
        return k[:batch], v[:batch], None

"""Key-value caches for earlier tokens: one contiguous range per sequence, or pages.

A manager stores the sequences and their lengths on the host. `pre_step` writes the changes of a
step to the device (rows that move, page tables). `step` only launches kernels on tensors with fixed
addresses, so that a CUDA graph can contain it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_int, with_article
from ..primitives.kv_cache import append, check_append
from ..runtime.device import canonical_device


def lasting_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that later steps can write in any mode: inference mode tensors are read-only elsewhere."""
    with torch.inference_mode(False):
        return torch.zeros(*shape, dtype=dtype, device=device)


class KVCacheManager(ABC):
    """Caches of all layers: cache[layer] = (keys, values), and sequences {id: tokens} in batch order."""

    page_size = 0  # tokens per page; 0: no pages
    page_table: Any = None

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Any, int] = OrderedDict()

    @abstractmethod
    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the cache of a layer; a second call for the same layer does nothing."""

    @abstractmethod
    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """Return the sequences {id: tokens including new ones} for a step {id: new tokens}; others are removed.

        Raises:
            ValueError: There is not enough memory for the sequences. Nothing has changed.
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
        """Append the new tokens, and return (keys, values, page table) for the step's sequences.

        Args:
            layer_number: Layer number.
            new_k: Keys of the new tokens.
            new_v: Values of the new tokens.
            cu_new_seqlens: int32 [b + 1], cumulative new tokens.
            cu_cached_seqlens: int32 [b + 1], cumulative tokens including the new ones.
            qkv_format: Layout of the new tokens.
        """

    def reset(self) -> None:
        """Remove every sequence; the memory stays allocated."""
        self.sequences.clear()

    def print_cache(self) -> None:
        """Print the contents: layers, and each sequence in the batch with its token count."""
        print("\n".join(self.described()))

    def described(self) -> list[str]:
        """Lines for print_cache."""
        lines = [
            f"{type(self).__name__}: layers {sorted(self.cache)}, {len(self.sequences)} sequences"
        ]
        for row, (sequence, tokens) in enumerate(self.sequences.items()):
            lines.append(
                f"  row {row}: sequence {sequence!r}, {tokens} tokens{self._find_place(sequence)}"
            )
        return lines

    def _find_place(self, sequence: Any) -> str:
        """Return the location of a sequence's tokens, unless its row determines it."""
        return ""

    def _advance(self, step_dict: Mapping[Any, int]) -> None:
        self.sequences = OrderedDict(
            (sequence, self.sequences.get(sequence, 0) + new) for sequence, new in step_dict.items()
        )


def whole_step(
    step_dict: Any, cached: Mapping[Any, int], max_batch: int, most: int, longest: int
) -> dict[Any, int]:
    """Return step_dict with plain integers; raise ValueError unless sequences, new tokens and totals are within limits.

    Args:
        step_dict: {sequence id: new tokens}.
        cached: {sequence id: cached tokens}.
        max_batch: Maximum sequence count.
        most: Maximum new tokens per sequence (max_ctx_len).
        longest: Maximum tokens per sequence, including the new ones.
    """
    if not isinstance(step_dict, Mapping):
        raise ValueError(
            f"a step is {with_article(type(step_dict))}; give a dictionary {{sequence: new tokens}}"
        )
    if len(step_dict) > max_batch:
        raise ValueError(
            f"{len(step_dict)} sequences in a step > max_batch_size={max_batch}; "
            "leave some for a later step or raise the limit"
        )
    step: dict[Any, int] = {}
    for sequence, value in step_dict.items():
        try:
            new = to_int("tokens", value)
        except TypeError:
            raise ValueError(
                f"sequence {sequence!r} brings {value!r} tokens, which is not a whole number; give an int"
            ) from None
        if not 0 <= new <= most:
            raise ValueError(
                f"sequence {sequence!r} brings {new} tokens, allowed: 0..max_ctx_len={most}; "
                "split the step or raise the limit"
            )
        total = cached.get(sequence, 0) + new
        if total > longest:
            raise ValueError(
                f"sequence {sequence!r} would have {total} tokens > max_sequence_length={longest}; "
                "end it or raise the limit"
            )
        step[sequence] = new
    return step


def check_layer(cache: Mapping[int, object], layer_number: int) -> None:
    """Raise ValueError unless the layer has memory."""
    if layer_number not in cache:
        raise ValueError(
            f"layer_number={layer_number} has no cache, there are {sorted(cache)}; call allocate_memory first"
        )


def check_batch(cached: Mapping[Any, int], cu_new_seqlens: Tensor) -> None:
    """Raise ValueError unless there is one length per sequence that pre_step announced."""
    batch = cu_new_seqlens.shape[0] - 1
    if batch != len(cached):
        raise ValueError(
            f"lengths of {batch} sequences, pre_step announced {len(cached)}; give those of the step"
        )


class NonPagedKVCacheManager(KVCacheManager):
    """Keys and values [max_batch_size, max_seqlen, heads, size]; row i belongs to the i-th sequence in the batch.

    A sequence whose position in the batch changes is moved, so keep the order if possible. The memory is initialized
    with
    zeros: a masked key contributes 0 times its value, which would be NaN for a NaN.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | str | int | None = "cuda",
    ) -> None:
        super().__init__()
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self.num_heads, self.dtype = num_heads, dtype
        self.head_dim_k, self.head_dim_v = (
            head_dim_k,
            head_dim_k if head_dim_v is None else head_dim_v,
        )
        self.device = canonical_device(device)
        self.longest_step = max_seqlen

    def allocate_memory(self, layer_number: int) -> None:
        if layer_number not in self.cache:
            options = {"dtype": self.dtype, "device": self.device}
            rows = (self.max_batch_size, self.max_seqlen, self.num_heads)
            keys, values = (
                lasting_zeros(*rows, size, **options) for size in (self.head_dim_k, self.head_dim_v)
            )
            self.cache[layer_number] = (keys, values)

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        step_dict = whole_step(
            step_dict, self.sequences, self.max_batch_size, self.max_seqlen, self.max_seqlen
        )
        row = {sequence: index for index, sequence in enumerate(self.sequences)}
        self._move(
            [
                (row[s], target)
                for target, s in enumerate(step_dict)
                if s in row and row[s] != target
            ]
        )
        self._advance(step_dict)
        self.longest_step = max(step_dict.values(), default=0)
        return self.sequences

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Copy row source to row target for all (source, target) at once."""
        if not moves or not self.cache:
            return
        where = torch.tensor(moves, device="cpu").t().to(self.device, non_blocking=True)
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
        if layer_number not in self.cache or cu_new_seqlens.shape[0] - 1 != len(self.sequences):
            check_layer(self.cache, layer_number)
            check_batch(self.sequences, cu_new_seqlens)
        k, v = self.cache[layer_number]
        check_append(
            new_k, k, None, cu_new_seqlens, cu_cached_seqlens, qkv_format, self.longest_step
        )
        append(
            new_k,
            new_v,
            k,
            v,
            None,
            cu_new_seqlens,
            cu_cached_seqlens,
            qkv_format,
            self.longest_step,
        )
        batch = cu_new_seqlens.shape[0] - 1
        return k[:batch], v[:batch], None

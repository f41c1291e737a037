"""Keys and values of earlier steps: cache[row, length .. length + new] = new tokens, one row a sequence.

A step: `pre_step({sequence id: new tokens})` says who is in the batch, in the order of the batch; every
attention layer then calls `step` with its new keys and values and attends to what comes back. Lengths are
known on the host from the dictionary, so nothing is read from the device; `step` depends on device tensors of
fixed address only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import canonical_device
from .dot_product_attention.layout import thd_to_bshd
from .dot_product_attention.mask import cumulative

FORMATS = ("sbhd", "bshd", "thd")


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


class CachedKeysValues(NamedTuple):
    """What an attention attends to: bshd keys and values of all sequences, and their cumulative lengths."""

    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_kv: int
    qkv_format: str


class KVCacheManager(ABC):
    """Where the keys and values of a layer are kept."""

    @abstractmethod
    def allocate_memory(self, layer_number: int) -> None:
        """Make room for a layer; a second call for the same layer does nothing."""

    @abstractmethod
    def reorder(self, rows: list[int | None]) -> None:
        """Row i becomes what row rows[i] was; None: a sequence that starts empty."""

    @abstractmethod
    def step(
        self, layer_number: int, k: Tensor, v: Tensor, start: Tensor, new: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write new[i] tokens of k, v [b, s, h, d] behind start[i] tokens of row i; return all."""


class NonPagedKVCacheManager(KVCacheManager):
    """One contiguous stretch of max_length tokens a sequence."""

    def __init__(self, shape: CacheShape):
        self.shape = shape
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def allocate_memory(self, layer_number: int) -> None:
        if layer_number in self.cache:
            return
        s = self.shape
        # Zeros: a masked key has probability 0, and 0 * NaN of unset memory would spoil the output.
        k, v = (
            torch.zeros(s.max_batch, s.max_length, s.heads, d, dtype=s.dtype, device=s.device)
            for d in (s.head_dim_k, s.head_dim_v)
        )
        self.cache[layer_number] = (k, v)

    def reorder(self, rows: list[int | None]) -> None:
        if all(row is None or row == index for index, row in enumerate(rows)):
            return
        source = torch.tensor([index if row is None else row for index, row in enumerate(rows)])
        for pair in self.cache.values():
            for tensor in pair:
                tensor[: len(rows)] = tensor[source.to(tensor.device)]

    def step(
        self, layer_number: int, k: Tensor, v: Tensor, start: Tensor, new: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, size = k.shape[:2]
        place = torch.arange(size, device=start.device)
        real = place < new[:, None]
        # Padding tokens rewrite what is there. Modulo the length, they never hit the place of a real token.
        slot = (start[:, None].long() + place) % self.shape.max_length
        row = torch.arange(batch, device=start.device)[:, None]
        for cache, tokens in zip(self.cache[layer_number], (k, v), strict=True):
            kept = torch.where(real[..., None, None], tokens.detach().to(cache.dtype), cache[row, slot])
            cache.index_put_((row, slot), kept)
        keys, values = self.cache[layer_number]
        return keys[:batch], values[:batch]


class InferenceParams:
    """The key-value caches of a model's attention layers, and which sequence is how long.

    max_batch_size, max_sequence_length   limits of a step's batch, and of a sequence including its new tokens
    num_heads_kv, head_dim_k, head_dim_v  of the keys and values that are cached (per tensor-parallel rank)
    max_ctx_len      the most new tokens of a sequence in one step; default max_sequence_length
    qkv_format       layout of the new tokens: sbhd, bshd (real tokens first, padding behind) or thd
    custom_cache_manager   a KVCacheManager to use instead of the contiguous one
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int = 16,
        head_dim_k: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: KVCacheManager | None = None,
        device: torch.device | str | int | None = "cuda",
    ):
        if is_paged:
            raise NotImplementedError(
                "is_paged=True is not available; use is_paged=False, the contiguous cache"
            )
        if qkv_format not in FORMATS:
            raise ValueError(f"qkv_format={qkv_format!r}; choose one of {', '.join(FORMATS)}")
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.num_heads_kv = num_heads_kv
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.is_paged = is_paged
        self.total_num_pages = total_num_pages
        self.page_size = page_size
        self.max_ctx_len = max_sequence_length if max_ctx_len is None else max_ctx_len
        self.qkv_format = qkv_format
        self.device = canonical_device(device)
        self.cache_manager = custom_cache_manager or NonPagedKVCacheManager(
            CacheShape(
                max_batch_size,
                max_sequence_length,
                num_heads_kv,
                head_dim_k,
                self.head_dim_v,
                dtype,
                self.device,
            )
        )
        self.sequences: OrderedDict[object, int] = OrderedDict()
        self.batch_size = 0
        self._longest_step = 0
        self._start = torch.zeros(max_batch_size, dtype=torch.int32, device=self.device)
        self._new = torch.zeros_like(self._start)

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[object, int]) -> None:
        """Begin a step of the sequences {id: new tokens}, in batch order.

        Known ids continue, unknown ones join, those left out are forgotten. Raises ValueError, before
        anything changes, when a limit would be exceeded.
        """
        self._check_step(step_dict)
        before = list(self.sequences)
        starts = [self.sequences.get(sequence, 0) for sequence in step_dict]
        self.cache_manager.reorder([before.index(s) if s in self.sequences else None for s in step_dict])
        self.sequences = OrderedDict((s, self.sequences.get(s, 0) + new) for s, new in step_dict.items())
        self.batch_size = len(starts)
        self._longest_step = max(step_dict.values(), default=0)
        padding = [0] * (self.max_batch_size - len(starts))
        self._start.copy_(torch.tensor(starts + padding, dtype=torch.int32))
        self._new.copy_(torch.tensor(list(step_dict.values()) + padding, dtype=torch.int32))

    def _check_step(self, step_dict: Mapping[object, int]) -> None:
        if len(step_dict) > self.max_batch_size:
            raise ValueError(
                f"{len(step_dict)} sequences in a step > max_batch_size={self.max_batch_size}; "
                "leave some for a later step or raise the limit"
            )
        for sequence, new in step_dict.items():
            total = self.sequences.get(sequence, 0) + new
            if not 0 <= new <= self.max_ctx_len:
                raise ValueError(
                    f"sequence {sequence!r} brings {new} tokens, allowed: 0..max_ctx_len={self.max_ctx_len}; "
                    "split the step or raise the limit"
                )
            if total > self.max_sequence_length:
                raise ValueError(
                    f"sequence {sequence!r} would have {total} tokens > "
                    f"max_sequence_length={self.max_sequence_length}; end it or raise the limit"
                )

    def get_seqlens_pre_step(self) -> Tensor:
        """Tokens [b] int32 that each sequence of this step had before it."""
        return self._start[: self.batch_size]

    @property
    def cu_seqlens_q(self) -> Tensor:
        """Cumulative new tokens [b + 1] int32 of this step."""
        return cumulative(self._new[: self.batch_size])

    @property
    def cu_seqlens_kv(self) -> Tensor:
        """Cumulative tokens [b + 1] int32 of the sequences, those of this step included."""
        return cumulative((self._start + self._new)[: self.batch_size])

    def step(self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str) -> CachedKeysValues:
        """Append a layer's new keys and values; all of them, masked by the lengths that come with them.

        The cache holds no gradient. Raises ValueError, before writing, when the tensors do not fit the step.
        """
        start, new = self._start[: self.batch_size], self._new[: self.batch_size]
        self._check_tokens(new_k, new_v, qkv_format)
        self.allocate_memory(layer_number)
        k, v = (self._to_bshd(x, qkv_format, new) for x in (new_k, new_v))
        k, v = self.cache_manager.step(layer_number, k, v, start, new)
        return CachedKeysValues(k, v, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, "bshd")

    def _to_bshd(self, x: Tensor, qkv_format: str, lengths: Tensor) -> Tensor:
        if qkv_format == "thd":
            return thd_to_bshd(x, self.cu_seqlens_q, lengths, self._longest_step)
        return x.transpose(0, 1) if qkv_format == "sbhd" else x

    def _check_tokens(self, new_k: Tensor, new_v: Tensor, qkv_format: str) -> None:
        if qkv_format not in FORMATS:
            raise ValueError(f"qkv_format={qkv_format!r}; choose one of {', '.join(FORMATS)}")
        expected = (self.num_heads_kv, self.head_dim_k), (self.num_heads_kv, self.head_dim_v)
        given = tuple(new_k.shape[-2:]), tuple(new_v.shape[-2:])
        if given != expected:
            raise ValueError(f"keys and values have (heads, size) {given}, the cache holds {expected}")
        if qkv_format == "thd":
            return
        size, batch = new_k.shape[:2] if qkv_format == "sbhd" else (new_k.shape[1], new_k.shape[0])
        if batch != self.batch_size:
            raise ValueError(
                f"keys of {batch} sequences, pre_step announced {self.batch_size}; call pre_step first"
            )
        if not self._longest_step <= size <= self.max_sequence_length:
            raise ValueError(
                f"keys have {size} tokens a sequence, this step needs {self._longest_step}.."
                f"{self.max_sequence_length}; pad or cut them"
            )

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, max_length, h, d] of a layer; this cache is not paged to begin with."""
        assert isinstance(self.cache_manager, NonPagedKVCacheManager)
        keys, values = self.cache_manager.cache[layer_number]
        return keys[: self.batch_size], values[: self.batch_size]

    def reset(self) -> None:
        """Forget every sequence; the memory stays."""
        self.sequences.clear()
        self.batch_size = self._longest_step = 0
        self._start.zero_()
        self._new.zero_()

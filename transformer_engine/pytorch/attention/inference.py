"""InferenceParams: keys and values of earlier tokens, and the length of every sequence in the batch.

For each step, `pre_step({sequence id: new tokens})` announces the sequences in batch order. Then every
attention layer calls `step` with its new keys and values, and attends to the returned ones. The dictionary
gives the lengths on the host, so that nothing is read from the device. `step` reads lengths and page tables
from device tensors with fixed addresses, which `pre_step` fills. A CUDA graph of a decoding step is therefore
captured once, and replayed after every `pre_step` with the same sequence and new token counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checks import check_option, described, suggests_keywords
from ...common.formats import ceil_div, round_up
from ...common.numbers import to_bool, to_int
from ..module.arguments import size_or_none
from ..primitives.kv_cache import gather_pages
from ..runtime.checks import tensor, tensor_dtype
from ..runtime.device import canonical_device
from .kv_cache import KVCacheManager, NonPagedKVCacheManager, lasting_zeros, whole_step
from .kv_cache_paged import PagedKVCacheManager

FORMATS = ("sbhd", "bshd", "thd")
# Managers whose results are known before their step.
_OURS = (NonPagedKVCacheManager, PagedKVCacheManager)


class CachedKeysValues(NamedTuple):
    """A step's key and value tokens, as attention inputs.

    Attributes:
        key: bshd [b, s, h, d]; with a page_table, pages [pages, page_size, h, d].
        value: As key.
        cu_seqlens_q: int32 [b + 1], cumulative new token counts.
        cu_seqlens_kv: int32 [b + 1], cumulative total token counts.
        max_seqlen_kv: Upper bound on the lengths in the cache.
        qkv_format: Key and value layout.
        page_table: int32 [b, pages], or None.
        page_size: Tokens per page.
        lengths_q: int32 [b], new token counts.
        lengths_kv: int32 [b], total token counts.
        max_seqlen_q: Upper bound on new tokens per sequence.
    """

    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_kv: int
    qkv_format: str
    page_table: Tensor | None = None
    page_size: int = 0
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    max_seqlen_q: int = 0


class StepLimits(NamedTuple):
    """Limits for a step's new keys and values: from the cache, and from the sequences that pre_step announced."""

    dtype: torch.dtype
    heads: int
    head_dim_k: int
    head_dim_v: int
    batch: int
    tokens: int
    longest: int
    max_sequence_length: int

    def check(self, new_k: Any, new_v: Any, qkv_format: str) -> None:
        """Raise ValueError unless the shapes, from tensors or descriptions, are within the limits."""
        if qkv_format not in FORMATS:
            raise ValueError(f"qkv_format={qkv_format!r}; choose one of {', '.join(FORMATS)}")
        if new_k.shape[:-2] != new_v.shape[:-2]:
            raise ValueError(
                f"new_k is {list(new_k.shape)} and new_v {list(new_v.shape)}; give keys and values of the same tokens"
            )
        expected = (self.heads, self.head_dim_k), (self.heads, self.head_dim_v)
        actual = tuple(new_k.shape[-2:]), tuple(new_v.shape[-2:])
        if actual != expected:
            raise ValueError(
                f"keys and values have (heads, size) {actual}, the cache holds {expected}; "
                "make it with num_heads_kv, head_dim_k and head_dim_v of the layer"
            )
        if qkv_format == "thd":
            if self.batch == 0 and new_k.shape[0]:
                raise ValueError(
                    f"keys of {new_k.shape[0]} tokens, no step is announced; call pre_step first"
                )
            if new_k.shape[0] < self.tokens:
                raise ValueError(
                    f"keys of {new_k.shape[0]} tokens, pre_step announced {self.tokens}; give all of them"
                )
            return
        size, batch = new_k.shape[:2] if qkv_format == "sbhd" else (new_k.shape[1], new_k.shape[0])
        if batch != self.batch:
            raise ValueError(
                f"keys of {batch} sequences, pre_step announced {self.batch}; call pre_step first, or reshape "
                f"new_k {list(new_k.shape)}"
            )
        if not self.longest <= size <= self.max_sequence_length:
            raise ValueError(
                f"keys have {size} tokens per sequence, this step needs {self.longest}.."
                f"{self.max_sequence_length}; pad or cut them"
            )


class Foreseen(NamedTuple):
    """Results of a future step: keys and values, their description, limits, the layer's cache, and the page table."""

    upcoming: CachedKeysValues
    described: Any
    limits: StepLimits
    pair: tuple[Tensor, Tensor]
    table: Tensor | None


class InferenceParams:
    """Key-value caches for the attention layers of a model, and the sequence lengths.

    Args:
        max_batch_size: Most sequences in a step.
        max_sequence_length: Maximum sequence length, with its new tokens.
        num_heads_kv: Cached key and value heads per tensor-parallel rank, 16 by default.
        head_dim_k: Key head size, 64 by default.
        dtype: Cache dtype, bfloat16 by default.
        head_dim_v: Value head size, by default head_dim_k.
        is_paged: Store tokens in pages, which sequences take as they grow.
        total_num_pages: Page count, by default enough for max_batch_size full-length sequences.
            With fewer, `pre_step` raises when they run out. Ignored unless is_paged.
        page_size: Tokens per page, 64 by default. Ignored unless is_paged.
        max_ctx_len: Most new tokens per sequence in one step, by default max_sequence_length.
        qkv_format: Layout of the new tokens: sbhd, bshd (padding at the end) or thd.
        custom_cache_manager: A KVCacheManager to use instead of the built-in ones.
        device: Cache device.
    """

    @suggests_keywords
    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: KVCacheManager | None = None,
        device: torch.device | str | int | None = "cuda",
    ) -> None:
        check_option("qkv_format", qkv_format, FORMATS)
        max_batch_size = to_int("max_batch_size", max_batch_size, 1)
        max_sequence_length = to_int("max_sequence_length", max_sequence_length, 1)
        num_heads_kv = 16 if num_heads_kv is None else to_int("num_heads_kv", num_heads_kv, 1)
        head_dim_k = 64 if head_dim_k is None else to_int("head_dim_k", head_dim_k, 1)
        dtype = torch.bfloat16 if dtype is None else dtype
        head_dim_v = size_or_none("head_dim_v", head_dim_v)
        max_ctx_len = size_or_none("max_ctx_len", max_ctx_len)
        page_size = size_or_none("page_size", page_size)
        total_num_pages = size_or_none("total_num_pages", total_num_pages)
        is_paged = to_bool("is_paged", is_paged)
        tensor_dtype("dtype", dtype)
        if custom_cache_manager is not None and not isinstance(
            custom_cache_manager, KVCacheManager
        ):
            raise TypeError(
                f"custom_cache_manager={described(custom_cache_manager)} is not a KVCacheManager; give an instance of "
                "a subclass, or None"
            )
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.num_heads_kv = num_heads_kv
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.is_paged = is_paged
        self.max_ctx_len = max_sequence_length if max_ctx_len is None else max_ctx_len
        self.qkv_format = qkv_format
        self.device = canonical_device(device)
        self.page_size, self.total_num_pages = self._pages(page_size, total_num_pages)
        self.cache_manager = custom_cache_manager or self._manager()
        self.sequences: OrderedDict[Any, int] = OrderedDict()
        self.batch_size = -1
        self.longest_step = 0  # most new tokens in a sequence
        self.step_tokens = 0  # new tokens in all sequences
        # One copy from the host fills all lengths; sections begin at multiples of 16 bytes.
        self._section = round_up(max_batch_size + 1, 4)
        self._lengths = lasting_zeros(5 * self._section, dtype=torch.int32, device=self.device)
        self._foreseen: dict[int, Foreseen] = {}
        self._set_batch_size(0)

    def _pages(
        self, page_size: int | None, total_num_pages: int | None
    ) -> tuple[int | None, int | None]:
        """Return tokens per page and page count, checked; None without pages."""
        if not self.is_paged:
            return None, None
        size = 64 if page_size is None else page_size
        most = self.max_batch_size * ceil_div(self.max_sequence_length, size)
        return size, most if total_num_pages is None else total_num_pages

    def _manager(self) -> KVCacheManager:
        heads = (self.num_heads_kv, self.head_dim_k, self.dtype)
        limits = (self.max_batch_size, self.max_sequence_length)
        if self.page_size is None or self.total_num_pages is None:
            return NonPagedKVCacheManager(*limits, *heads, self.head_dim_v, self.device)
        pages = (self.total_num_pages, self.page_size)
        return PagedKVCacheManager(*pages, *heads, *limits, self.head_dim_v, self.device)

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the cache of a layer; by default, its first `step` does it."""
        if type(layer_number) is not int or layer_number < 1:
            layer_number = to_int("layer_number", layer_number)
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Begin a step for the sequences {id: new tokens}, in batch order.

        Known ids continue, unknown ids start a sequence, and all other sequences are removed: {} removes all.

        Raises:
            ValueError: A limit would be exceeded, or no page is free. Nothing has changed.
        """
        step_dict = whole_step(
            step_dict,
            self.sequences,
            self.max_batch_size,
            self.max_ctx_len,
            self.max_sequence_length,
        )
        starts = [self.sequences.get(sequence, 0) for sequence in step_dict]
        news = list(step_dict.values())
        self.cache_manager.pre_step(step_dict)
        totals = [start + new for start, new in zip(starts, news, strict=True)]
        self.sequences = OrderedDict(zip(step_dict, totals, strict=True))
        self._set_batch_size(len(starts))
        self.longest_step = max(news, default=0)
        self.step_tokens = sum(news)
        rows = (starts, news, totals, accumulate(news, initial=0), accumulate(totals, initial=0))
        filled: list[int] = []
        for end, row in enumerate(rows, start=1):
            filled.extend(row)
            filled.extend([0] * (end * self._section - len(filled)))
        # The host memory is not pinned: the copy is staged before the call returns, and does not wait for the device.
        self._lengths.copy_(
            torch.tensor(filled, dtype=torch.int32, device="cpu"), non_blocking=True
        )

    def _set_batch_size(self, size: int) -> None:
        """Slice the lengths to the batch, once per batch size instead of in every layer and step."""
        if size == self.batch_size:
            return
        self.batch_size = size
        start, new, total, cu_new, cu_total = self._lengths.split(self._section)
        self._start, self._new, self._total = start[:size], new[:size], total[:size]
        self._cu_new, self._cu_total = cu_new[: size + 1], cu_total[: size + 1]

    def get_seqlens_pre_step(self) -> Tensor:
        """Return int32 [b]: token counts per sequence before this step."""
        return self._start

    @property
    def cu_seqlens_q(self) -> Tensor:
        """Cumulative new tokens of this step, int32 [b + 1]."""
        return self._cu_new

    @property
    def cu_seqlens_kv(self) -> Tensor:
        """Cumulative sequence tokens including this step, int32 [b + 1]."""
        return self._cu_total

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> CachedKeysValues:
        """Append a layer's new keys and values, and return all keys and values with the lengths that mask them.

        The cache has no gradient.

        Args:
            layer_number: Layer number.
            new_k: Keys of the new tokens.
            new_v: Values of the new tokens.
            qkv_format: Layout of the new tokens.

        Raises:
            ValueError: The tensors do not fit the step. Nothing has been written.
        """
        tensor("new_k", new_k)
        tensor("new_v", new_v)
        self.limits(qkv_format).check(new_k, new_v, qkv_format)
        self.allocate_memory(layer_number)
        return self._with_lengths(*self.write(layer_number, new_k, new_v, qkv_format))

    @property
    def foresees(self) -> bool:
        """Whether `upcoming` can describe the results of a step; results from a custom manager are unknown."""
        return type(self.cache_manager) in _OURS

    def limits(self, qkv_format: str) -> StepLimits:
        """Return the limits for the step's new keys and values, which include the packed token count."""
        return StepLimits(*self._limits(qkv_format))

    def _limits(self, qkv_format: str) -> tuple[Any, ...]:
        tokens = self.step_tokens if qkv_format == "thd" else 0
        heads = (self.dtype, self.num_heads_kv, self.head_dim_k, self.head_dim_v)
        return (*heads, self.batch_size, tokens, self.longest_step, self.max_sequence_length)

    def upcoming(self, layer_number: int) -> CachedKeysValues | None:
        """Return the result of `step` without writing anything, for checks before a call has effects.

        None if a custom manager computes the result, or if the layer has no memory yet.
        """
        manager = self.cache_manager
        if not self.foresees or layer_number not in manager.cache:
            return None
        k, v = manager.cache[layer_number]
        if manager.page_table is not None:
            return self._with_lengths(k, v, manager.page_table[: self.batch_size])
        return self._with_lengths(k[: self.batch_size], v[: self.batch_size], None)

    def foreseen(
        self,
        layer_number: int,
        qkv_format: str,
        describe: Callable[[CachedKeysValues, StepLimits], Any],
    ) -> Foreseen | None:
        """Return `upcoming` and describe(upcoming, limits), cached for equal steps; not while a compiler traces."""
        manager = self.cache_manager
        pair = manager.cache.get(layer_number) if type(manager) in _OURS else None
        made = self._foreseen.get(layer_number)
        if (
            made is not None
            and made.pair is pair
            and made.table is manager.page_table
            and made.upcoming.cu_seqlens_q is self._cu_new
            and made.limits == self._limits(qkv_format)
        ):
            return made
        upcoming = self.upcoming(layer_number)
        if upcoming is None:
            return None
        assert pair is not None, "the steps of a custom manager are unknown"
        limits = self.limits(qkv_format)
        made = Foreseen(upcoming, describe(upcoming, limits), limits, pair, manager.page_table)
        self._foreseen[layer_number] = made
        return made

    def write(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append new keys and values that `upcoming` has described; return keys, values and page table."""
        return self.cache_manager.step(
            layer_number, new_k, new_v, self._cu_new, self._cu_total, qkv_format
        )

    def _with_lengths(self, k: Tensor, v: Tensor, table: Tensor | None) -> CachedKeysValues:
        page_size = 0 if table is None else k.shape[1]
        return CachedKeysValues(
            k,
            v,
            self._cu_new,
            self._cu_total,
            k.shape[1] if table is None else table.shape[1] * page_size,
            "bshd",
            table,
            page_size,
            self._new,
            self._total,
            self.longest_step,
        )

    step_kv_cache = step

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, s, h, d] of a layer for the step's sequences, each contiguous.

        Pages are copied, including the values after a sequence's last token; a cache without pages returns itself.
        """
        k, v = self.cache_manager.cache[layer_number]
        if not isinstance(self.cache_manager, PagedKVCacheManager):
            return k[: self.batch_size], v[: self.batch_size]
        table = self.cache_manager.page_table[: self.batch_size]
        return gather_pages(k, table), gather_pages(v, table)

    def print(self) -> None:
        """Print the limits and the contents of the cache."""
        print(
            f"InferenceParams: {len(self.sequences)} of {self.max_batch_size} sequences, up to "
            f"{self.max_sequence_length} tokens, {self.num_heads_kv} heads of {self.head_dim_k} and {self.head_dim_v} "
            f"in {self.dtype}"
        )
        self.cache_manager.print_cache()

    def reset(self) -> None:
        """Remove every sequence; the memory stays allocated."""
        self.cache_manager.reset()
        self.sequences.clear()
        self.longest_step = self.step_tokens = 0
        self._set_batch_size(0)
        self._lengths.zero_()

"""New keys and values behind those that a cache holds, page by page or in one stretch a sequence."""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .checks import check_append as check_append
from .request import CacheRequest

TABLE: Table[CacheRequest] = Table("kv_cache", (triton.BACKEND, reference.BACKEND))


def append(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cu_new: Tensor,
    cu_cached: Tensor,
    tensor_format: str,
    longest: int,
) -> None:
    """cache[b, cached_b - new_b + i] = new token i of sequence b, i < new_b; keys and values, in place.

    new_k, new_v      [s, b, h, d] (sbhd), [b, s, h, d] (bshd; real tokens first) or [t, h, d] (thd)
    k_cache, v_cache  contiguous [sequences, tokens, h, d]; with page_table [pages, page size, h, d]
    page_table        int32 [b, pages a sequence]: where each sequence's pages lie
    cu_new, cu_cached int32 [b + 1]: cumulative new tokens, and cumulative tokens with the new ones
    longest           a bound of new_b that the host knows

    Lengths and pages are trusted, `check_append` judges them; tokens without a place in the cache, or whose page does
    not exist, are left out. Cast to the cache's dtype; nothing is read on the host.
    """
    request = CacheRequest(new_k.dtype, k_cache.dtype, k_cache.device)
    TABLE.select(request).run(
        new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached, tensor_format, longest
    )


def gather_pages(cache: Tensor, page_table: Tensor) -> Tensor:
    """[b, pages a sequence * page size, h, d] of pages [pages, page size, h, d]: every sequence in one stretch."""
    return cache[page_table.long()].flatten(1, 2)

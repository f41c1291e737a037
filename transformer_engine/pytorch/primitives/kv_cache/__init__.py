"""Append keys and values to a cache, which is paged or contiguous per sequence."""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator, rows_dense
from . import reference, triton
from .checks import check_append as check_append
from .reference import CacheRequest


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
    """cache[b, cached_b - new_b + i] = new token i of sequence b, i < new_b, for keys and values, in place.

    Lengths and pages are not checked here; see `check_append`. Tokens outside the cache, or whose page does not exist,
    are skipped. Values are cast to the cache's dtype; nothing is read on the host.

    Args:
        new_k: Keys [s, b, h, d] (sbhd), [b, s, h, d] (bshd; real tokens first) or [t, h, d] (thd).
        new_v: Values, in the same layout.
        k_cache: Contiguous [sequences, tokens, h, d]; with page_table [pages, page size, h, d].
        v_cache: As k_cache.
        page_table: int32 [b, pages per sequence]: each sequence's page indices.
        cu_new: int32 [b + 1]: cumulative new tokens.
        cu_cached: int32 [b + 1]: cumulative tokens, including the new ones.
        tensor_format: "sbhd", "bshd" or "thd".
        longest: Upper bound of new_b, known on the host.
    """
    new_k, new_v = rows_dense(new_k), rows_dense(new_v)
    key = (
        new_k.dtype,
        k_cache.dtype,
        k_cache.device,
        (k_cache.shape, v_cache.shape),
        (new_k.stride(), new_v.stride()),
        None if page_table is None else (page_table.shape[1], page_table.stride(0)),
        tensor_format,
        cu_new.shape[0] - 1,
        longest,
        new_k.numel() + new_v.numel() == 0,
    )
    TABLE.bound(key)(new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached)


def gather_pages(cache: Tensor, page_table: Tensor) -> Tensor:
    """Gather pages [pages, page size, h, d] into [b, pages per sequence * page size, h, d], contiguous per sequence."""
    return cache[page_table.long()].flatten(1, 2)


_operator = operator(
    "append_to_kv_cache(Tensor new_k, Tensor new_v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? page_table,"
    " Tensor cu_new, Tensor cu_cached, str tensor_format, int longest) -> ()",
    append,
    lambda *_: None,
)


TABLE: Table[CacheRequest] = Table(
    "kv_cache",
    (triton.BACKEND, reference.BACKEND),
    describe=CacheRequest,
    operator=lambda request: _operator.given(
        tensor_format=request.tensor_format, longest=request.longest
    ),
)

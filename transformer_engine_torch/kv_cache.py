"""Key-value caches and conversions of layouts: padded and packed sequences, interleaved queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.pytorch.primitives.attention.layout import bshd_to_thd, thd_to_bshd
from transformer_engine.pytorch.primitives.attention.sequence_rules import are_bounds
from transformer_engine.pytorch.primitives.kv_cache import append, check_append
from transformer_engine.pytorch.runtime.checks import same_shape, tensor
from transformer_engine.pytorch.runtime.device_checks import demand

from .checks import with_axes
from .enums import NVTE_QKV_Format

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
    "mha_fill",
]

_FORMATS = {
    NVTE_QKV_Format.NVTE_SBHD: "sbhd",
    NVTE_QKV_Format.NVTE_BSHD: "bshd",
    NVTE_QKV_Format.NVTE_THD: "thd",
}


def format_name(qkv_format: NVTE_QKV_Format | int | str) -> str:
    """Return "sbhd", "bshd" or "thd" for an enumeration member, its number or name; ValueError for others."""
    name = qkv_format if isinstance(qkv_format, str) else _FORMATS.get(NVTE_QKV_Format(qkv_format))
    if name is None or name not in _FORMATS.values():
        raise ValueError(
            f"qkv_format={qkv_format!r} is not supported; convert it to one of {', '.join(_FORMATS.values())}"
        )
    return name


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: NVTE_QKV_Format | int | str,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Append new keys and values to the cache for b sequences, in place.

    Tokens beyond the cache and on missing pages are skipped if they are not checked.

    Raises:
        ValueError: Lengths or pages are invalid. Nothing has been written. Those on a GPU are checked with TE_CHECK=1
            only.
    """
    for name, new, cache in (("k", new_k, k_cache), ("v", new_v, v_cache)):
        if new.shape[-2:] != cache.shape[-2:] or not cache.is_contiguous():
            raise ValueError(
                f"new_{name} {list(new.shape)} does not fit {name}_cache {list(cache.shape)}, strides "
                f"{list(cache.stride())}; both end in (heads, size), and the cache is contiguous"
            )
    name = format_name(qkv_format)
    if is_non_paged:
        table = None
    elif page_table is None:
        raise ValueError(
            "a paged cache needs page_table [b, max_pages_per_seq]; or set is_non_paged=True"
        )
    else:
        table = page_table[:b, :max_pages_per_seq]
    cu_new, cu_cached = cu_new_lens[: b + 1], cu_cached_lens[: b + 1]
    check_append(new_k, k_cache, table, cu_new, cu_cached, name, max_ctx_len)
    if is_non_paged and page_table is not None:
        demand(_are_rows, (page_table[:b],), k_cache.shape[0])
        rows = page_table[:b].long()
        for cache in (k_cache, v_cache):
            cache[:b] = cache[rows]
    append(new_k, new_v, k_cache, v_cache, table, cu_new, cu_cached, name, max_ctx_len)


def _are_rows(rows: list[int], limit: int) -> None:
    for row in rows:
        if not 0 <= row < limit:
            raise ValueError(
                f"page_table moves row {row} of the cache, outside of 0..{limit - 1}; correct it"
            )


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Convert packed tokens [t, h, d] to [b, max_seq_len, h, d], padded with zeros."""
    bounds = cu_seqlens[: b + 1]
    demand(are_bounds, (bounds, None), "cu_seqlens", tensor.shape[0], max_seq_len)
    return thd_to_bshd(tensor, bounds, bounds[1:] - bounds[:-1], max_seq_len)


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Convert [b, s, h, d] to packed tokens [t, h, d]; tokens after the last sequence are zero."""
    demand(are_bounds, (cu_seqlens, None), "cu_seqlens", t, tensor.shape[1])
    return bshd_to_thd(tensor, cu_seqlens, cu_seqlens[1:] - cu_seqlens[:-1], t)


def mha_fill(tensor: Tensor, value: float | Tensor) -> None:
    """Set tensor[:] = value in place; with a tensor int [1] as value, set the rows from that index on to 0.

    Args:
        tensor: The tensor [rows, ..] to write.
        value: A number, or an integer tensor [1].
    """
    if not isinstance(value, Tensor):
        tensor.fill_(value)
        return
    row = torch.arange(tensor.shape[0], device=tensor.device)
    tensor.masked_fill_((row >= value).view(-1, *[1] * (tensor.dim() - 1)), 0)


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """Separate queries, keys and values [3, b, s, h, d] in an interleaved buffer [s, b, h, 3 d].

    Args:
        qkvi: The buffer [s, b, h, 3 d], or its queries [s, b, h, d] as a view.
    """
    tensor("qkvi", qkvi)
    if qkvi.dim() != 4:
        raise ValueError(
            f"qkvi is {list(qkvi.shape)}; give [s, b, h, 3 d], or its queries as a view of it"
        )
    size = qkvi.shape[-1]
    if qkvi.stride(2) == 3 * size:
        qkvi = qkvi.as_strided((*qkvi.shape[:3], 3 * size), qkvi.stride())
    elif size % 3:
        raise ValueError(
            f"qkvi {list(qkvi.shape)} neither ends in 3 * d features nor is a view of one that does; give either"
        )
    return qkvi.unflatten(-1, (3, -1)).permute(3, 1, 0, 2, 4).contiguous()


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Interleave gradients q, k, v [b, s, h, d] to [s, b, h, 3 d]; the inverse of fa_prepare_fwd.

    Args:
        q: Query gradient [b, s, h, d].
        k: Key gradient.
        v: Value gradient.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        with_axes(name, x, 3)
    for name, x in (("k", k), ("v", v)):
        same_shape(name, x, "q", q)
    return torch.stack((q, k, v), dim=-2).flatten(-2).transpose(0, 1).contiguous()

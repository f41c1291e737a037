"""out [t, heads, size] = attention of packed queries over keys in caches, each sequence with a length of its own.

A sequence's last query stands at its last key (causal, bottom right). Lengths are read on the device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import DotProductAttention


class PackedRows(NamedTuple):
    """cu_queries int32 [b + 1] and the longest of them; lengths int32 [b] of keys, in rows of `width` each."""

    cu_queries: Tensor
    longest: int
    lengths: Tensor
    width: int


def packed_core(
    config: Any, heads: int, groups: int, window: tuple[int, int] | None, scale: float | None
) -> DotProductAttention:
    """The attention that goes over caches: that of a core attention, for packed sequences."""
    return DotProductAttention(
        heads,
        config.kv_channels,
        num_gqa_groups=groups,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=window,
        softmax_scale=scale,
        softmax_type=config.softmax_type,
    ).eval()


def attend(
    core: DotProductAttention, query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows
) -> Tensor:
    """query [t, heads, size]; keys and values [b, width, groups, size] of which the first lengths[i] count."""
    batch = rows.lengths.shape[0]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * rows.width
    ends = torch.cat((starts[:1], rows.lengths.cumsum(0, dtype=torch.int32)))
    out = core(
        query,
        keys.flatten(0, 1),
        values.flatten(0, 1),
        cu_seqlens_q=rows.cu_queries,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=rows.cu_queries,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=rows.longest,
        max_seqlen_kv=rows.width,
        pad_between_seqs=True,
    )
    return out.view(*query.shape[:-1], values.shape[-1])


def of_pages(cache: Tensor, table: Tensor) -> Tensor:
    """[b, pages of a request * page_size, groups, size] of a cache [pages, page_size, groups, size]."""
    return cache[table.long().clamp(min=0)].flatten(1, 2)

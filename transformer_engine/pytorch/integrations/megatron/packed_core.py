"""out [t, heads, size] = attention from packed queries over keys in caches, with individual sequence lengths.

A sequence's last query is at its last key's position (causal, bottom right). Lengths are read on the device only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import DotProductAttention


class PackedRows(NamedTuple):
    """cu_queries int32 [b + 1] and the longest query sequence; key lengths int32 [b], in rows of `width`."""

    cu_queries: Tensor
    longest: int
    lengths: Tensor
    width: int


def packed_core(
    config: Any, heads: int, groups: int, window: tuple[int, int] | None, scale: float | None
) -> DotProductAttention:
    """Return the attention over caches: a core attention with these settings, for packed sequences."""
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
    """Attend from query [t, heads, size] to the first lengths[i] key and value rows for each i."""
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

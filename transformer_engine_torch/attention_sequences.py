"""The sequences of a fused attention's call, from cumulative lengths, offsets and page tables."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from transformer_engine.pytorch.primitives.attention.packed import sequence_lengths
from transformer_engine.pytorch.primitives.attention.sequence_rules import are_bounds, has_pages
from transformer_engine.pytorch.runtime.device_checks import demand

from .layout import Layout


class BatchExtents(NamedTuple):
    """Batch extents, and lengths and starts in AttentionInputs."""

    batch: int
    max_q: int
    max_kv: int
    padded_between: bool
    lengths_q: Tensor | None
    lengths_kv: Tensor | None
    starts_q: Tensor | None
    starts_kv: Tensor | None


def describe_sequences(
    layout: Layout,
    padding: bool,
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    starts: tuple[Tensor | None, Tensor | None],
    max_seqlens: tuple[int, int],
    page_table: Tensor | None,
) -> BatchExtents:
    """Lengths if they matter, and dense tensor sizes from the shapes."""
    packed_q, packed_kv = layout.q_format == "thd", layout.kv_format == "thd"
    lengths_needed = padding or packed_q or packed_kv or layout.paged
    lengths_q = sequence_lengths(cu_seqlens[0]) if lengths_needed else None
    same = cu_seqlens[0] is cu_seqlens[1]
    lengths_kv = lengths_q if same or not lengths_needed else sequence_lengths(cu_seqlens[1])
    extent_q = max_seqlens[0] if packed_q else q.shape[layout.q_format.index("s")]
    extent_kv = max_seqlens[1] if packed_kv else k.shape[layout.kv_format.index("s")]
    if page_table is not None:
        extent_kv = page_table.shape[1] * k.shape[1]
        demand(has_pages, (page_table, cu_seqlens[1]), *k.shape[:2])
    if lengths_needed:
        tokens_q, tokens_kv = (
            x.shape[0] if p else None for x, p in ((q, packed_q), (k, packed_kv))
        )
        demand(are_bounds, (cu_seqlens[0], starts[0]), "cu_seqlens_q", tokens_q, extent_q)
        if not (same and starts[1] is starts[0] and (tokens_kv, extent_kv) == (tokens_q, extent_q)):
            demand(are_bounds, (cu_seqlens[1], starts[1]), "cu_seqlens_kv", tokens_kv, extent_kv)
    return BatchExtents(
        batch=cu_seqlens[0].shape[0] - 1,
        max_q=extent_q,
        max_kv=extent_kv,
        padded_between=(packed_q and starts[0] is not None)
        or (packed_kv and starts[1] is not None),
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        starts_q=(cu_seqlens[0] if starts[0] is None else starts[0]) if packed_q else None,
        starts_kv=(cu_seqlens[1] if starts[1] is None else starts[1]) if packed_kv else None,
    )

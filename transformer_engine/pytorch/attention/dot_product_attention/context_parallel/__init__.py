"""Sequences shared by context-parallel ranks: the tokens of a rank, and batches that are padded and split for it."""

from ....functions.attention.context_parallel.layout import (
    get_cu_seqlens_on_cp_rank,
    thd_cp_rank_order_to_sequence_order,
    thd_sequence_order_to_cp_rank_order,
)
from .batches import generate_positional_ids_for_cp, get_batch_on_this_cp_rank, pad_thd_sequences_for_cp

__all__ = [
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "pad_thd_sequences_for_cp",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
]

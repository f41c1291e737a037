"""Sequences shared by context-parallel ranks: the tokens of a rank, and batches that are padded and split for it."""

from ....functions.attention.context_parallel.layout import (
    get_cu_seqlens_on_cp_rank,
    get_thd_partitioned_indices,
    restore_thd_gathered_kv,
    thd_cp_rank_order_to_sequence_order,
    thd_sequence_order_to_cp_rank_order,
    unrestore_thd_gathered_kv,
)
from .batches import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    get_no_load_balance_thd_causal_metadata,
    pad_thd_sequences_for_cp,
    validate_no_load_balance_thd_metadata,
)
from .calls import attn_forward_func_with_cp

__all__ = [
    "attn_forward_func_with_cp",
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "get_no_load_balance_thd_causal_metadata",
    "get_thd_partitioned_indices",
    "pad_thd_sequences_for_cp",
    "restore_thd_gathered_kv",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
    "unrestore_thd_gathered_kv",
    "validate_no_load_balance_thd_metadata",
]

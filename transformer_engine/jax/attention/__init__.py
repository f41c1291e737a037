"""Attention for transformer_engine.jax: vocabulary, sequences, masks, and the call."""

from ..context_parallel.reorder import (
    CPStrategy,
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from ..primitives.attention.descriptor import SequenceDescriptor
from ..primitives.attention.enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVFormat,
    QKVLayout,
    canonicalize_attn_mask_type,
)
from ..primitives.attention.masks import make_swa_mask, run_length_fill
from .availability import is_fused_attn_kernel_available
from .fused import fused_attn, fused_attn_thd

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "QKVFormat",
    "QKVLayout",
    "ReorderStrategy",
    "SequenceDescriptor",
    "canonicalize_attn_mask_type",
    "fused_attn",
    "fused_attn_thd",
    "inverse_reorder_causal_load_balancing",
    "is_fused_attn_kernel_available",
    "make_swa_mask",
    "reorder_causal_load_balancing",
    "run_length_fill",
]

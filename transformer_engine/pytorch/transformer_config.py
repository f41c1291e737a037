"""Settings of TransformerLayer, and what a change of one of them does to its children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .module.config import Config

# Attributes that children work by, and those that decided which children there are.
WORKED_BY = {
    "attn_input_format": ("self_attention.qkv_format", "inter_attention.qkv_format"),
    "enc_dec_attn_mask_type": ("inter_attention.attn_mask_type",),
    "layer_number": ("self_attention.layer_number", "inter_attention.layer_number"),
    "self_attn_mask_type": ("self_attention.attn_mask_type",),
    "sequence_parallel": (
        "self_attention.sequence_parallel",
        "inter_attention.sequence_parallel",
        "layernorm_mlp.sequence_parallel",
        "layernorm.sequence_parallel",
    ),
}
FIXED = frozenset(
    {"apply_residual_connection_post_layernorm", "layer_type", "output_layernorm", "parallel_attention_mlp"}
)


@dataclass(frozen=True, eq=False)
class LayerConfig(Config):
    layer_type: str = "encoder"
    layer_number: int | None = None
    hidden_dropout: float = 0.1
    self_attn_mask_type: str = "causal"
    enc_dec_attn_mask_type: str = "no_mask"
    output_layernorm: bool = False
    parallel_attention_mlp: bool = False
    apply_residual_connection_post_layernorm: bool = False
    attn_input_format: str = "sbhd"
    tp_group: Any = None
    tp_size: int = 1
    sequence_parallel: bool = False

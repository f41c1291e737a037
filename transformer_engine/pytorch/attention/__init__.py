"""Attention layers, rotary position embedding and key-value caches."""

from ..functions.split_heads import SplitAlongDim as _SplitAlongDim
from .dot_product_attention import DotProductAttention
from .inference import InferenceParams
from .linear_attention import (
    GatedDeltaNet2Attention,
    GatedDeltaNetAttention,
    GatedDeltaProductAttention,
)
from .mla_projection import FusedMLAQUpProjRopeQuant
from .multi_head_attention import MultiheadAttention
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "FusedMLAQUpProjRopeQuant",
    "GatedDeltaNet2Attention",
    "GatedDeltaNetAttention",
    "GatedDeltaProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "_SplitAlongDim",
    "apply_rotary_pos_emb",
]

"""Flax (linen) modules in transformer_engine.jax."""

from .attention import DotProductAttention
from .base import extend_logical_axis_rules
from .dense_general import DenseGeneral
from .layernorm_dense_general import LayerNormDenseGeneral
from .layernorm_mlp import LayerNormMLP
from .moe import _MoEBlock
from .multi_head_attention import MultiHeadAttention
from .norm import LayerNorm
from .positions import RelativePositionBiases
from .state_module import (
    make_dot_general_cls,
    make_grouped_dense_cls,
    wrap_function_in_te_state_module,
)
from .transformer import TransformerLayer, TransformerLayerType

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerLayer",
    "TransformerLayerType",
    "_MoEBlock",
    "extend_logical_axis_rules",
    "make_dot_general_cls",
    "make_grouped_dense_cls",
    "wrap_function_in_te_state_module",
]

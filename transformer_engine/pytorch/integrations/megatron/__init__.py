"""Attention layers with Megatron-core's constructors and calls, for its layer specs and for programs without it.

In a Megatron-core layer spec, set `spec.submodules.self_attention.module = SelfAttention`.

The layers accept Megatron-core's TransformerConfig, ModuleSpec, process groups and inference contexts, and derive
from its MegatronModule if it is installed. Otherwise, use the equivalents of this package: `TransformerConfig`,
`self_attention_submodules()`, `cross_attention_submodules()`, `StaticContext`, `PagedContext`.
"""

from .attention import Attention
from .contexts import PagedContext, StaticContext
from .cross_attention import CrossAttention
from .equivalents import (
    AttnMaskType,
    CrossAttentionSubmodules,
    ModuleSpec,
    PackedSequences,
    SelfAttentionSubmodules,
    TransformerConfig,
)
from .layers import cross_attention_submodules, self_attention_submodules
from .self_attention import SelfAttention

__all__ = [
    "Attention",
    "AttnMaskType",
    "CrossAttention",
    "CrossAttentionSubmodules",
    "ModuleSpec",
    "PackedSequences",
    "PagedContext",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "StaticContext",
    "TransformerConfig",
    "cross_attention_submodules",
    "self_attention_submodules",
]

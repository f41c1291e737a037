"""What attention layers are made of, as Megatron-core's layer specs hand it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SelfAttentionSubmodules:
    """What a SelfAttention is made of: ModuleSpecs, classes, or functions that make a module."""

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


@dataclass
class CrossAttentionSubmodules:
    """What a CrossAttention is made of."""

    linear_q: Any = None
    linear_kv: Any = None
    core_attention: Any = None
    linear_proj: Any = None

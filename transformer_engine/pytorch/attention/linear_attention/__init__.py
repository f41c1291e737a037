"""Linear attention by gated delta rules: Gated DeltaNet, Gated DeltaNet 2 and Gated DeltaProduct."""

from .base import LinearAttentionBase
from .gdn import GatedDeltaNetAttention
from .gdn2 import GatedDeltaNet2Attention
from .gdp import GatedDeltaProductAttention

__all__ = [
    "GatedDeltaNet2Attention",
    "GatedDeltaNetAttention",
    "GatedDeltaProductAttention",
    "LinearAttentionBase",
]

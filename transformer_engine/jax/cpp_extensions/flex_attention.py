"""Attention with a score function under NVIDIA's path."""

from ...common import absent
from .attention import (
    ScoreModConfig,
    fused_attn_bwd,
    fused_attn_fwd,
    make_fused_attn_score_mod_config,
)

__all__ = ["ScoreModConfig", "fused_attn_bwd", "fused_attn_fwd", "make_fused_attn_score_mod_config"]

absent.install_getter(__name__)

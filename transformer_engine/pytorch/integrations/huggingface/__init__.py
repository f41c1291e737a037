"""Hugging Face models on this engine.

    inject_te_attention(model)     # attention layers, in place, whatever library the model comes from
    register_te_attention()        # attn_implementation="transformer_engine" in transformers

`transformers` is imported by the second alone.
"""

from .injection import inject_te_attention, inject_te_attention_into_module
from .interface import register_te_attention
from .stats import get_te_attention_stats, reset_te_attention_stats

__all__ = [
    "get_te_attention_stats",
    "inject_te_attention",
    "inject_te_attention_into_module",
    "register_te_attention",
    "reset_te_attention_stats",
]

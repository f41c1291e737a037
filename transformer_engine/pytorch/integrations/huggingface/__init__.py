"""Hugging Face models on this engine.

    convert_hf(model, recipe=..)   # whole decoder layers of transformers, in place; revert_hf(model) goes back
    inject_te_attention(model)     # attention layers, in place, whatever library the model comes from
    register_te_attention()        # attn_implementation="transformer_engine" in transformers

`transformers` is imported by the first and the last alone.
"""

from ....common import absent
from .convert import convert_hf, revert_hf
from .core import get_te_attention_stats, reset_te_attention_stats
from .injection import inject_te_attention, inject_te_attention_into_module
from .interface import register_te_attention

__all__ = [
    "convert_hf",
    "get_te_attention_stats",
    "inject_te_attention",
    "inject_te_attention_into_module",
    "register_te_attention",
    "reset_te_attention_stats",
    "revert_hf",
]

absent.answer_in(__name__)

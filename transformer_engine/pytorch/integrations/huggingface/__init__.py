"""Hugging Face models with this package's layers.

* `convert_hf(model, recipe=..)` converts whole transformers decoder layers in place; `revert_hf(model)` undoes it.
* `inject_te_attention(model)` converts attention layers in any library in place.
* `register_te_attention()` registers attn_implementation="transformer_engine" in transformers.

Only the first and the last function import `transformers`.
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

absent.install_getters(__name__)

"""TransformerLayer settings: rules and checks for its arguments, and how changes affect its children."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..common.checks import check_option
from .constants import LayerTypes
from .module.arguments import Rule, checked
from .module.config import Config
from .runtime.warn_once import warn_once

# {setting: attributes of children that receive its value when it is assigned}.
CHILD_ATTRIBUTES = {
    "attn_input_format": ("self_attention.qkv_format", "inter_attention.qkv_format"),
    "enc_dec_attn_mask_type": ("inter_attention.attn_mask_type",),
    "layer_number": ("self_attention.layer_number", "inter_attention.layer_number"),
    "self_attn_mask_type": ("self_attention.attn_mask_type",),
    "softcap": ("self_attention.softcap", "inter_attention.softcap"),
    "sequence_parallel": (
        "self_attention.sequence_parallel",
        "inter_attention.sequence_parallel",
        "layernorm_mlp.sequence_parallel",
        "layernorm.sequence_parallel",
    ),
}
# Settings that determined which children exist; they cannot be assigned.
FIXED = frozenset(
    {
        "apply_residual_connection_post_layernorm",
        "layer_type",
        "output_layernorm",
        "parallel_attention_mlp",
    }
)


@dataclass(frozen=True, eq=False)
class TransformerLayerConfig(Config):
    """Layer settings under the names of its constructor."""

    layer_type: str = "encoder"
    layer_number: int | None = None
    hidden_dropout: float = 0.1
    self_attn_mask_type: str = "causal"
    enc_dec_attn_mask_type: str = "no_mask"
    softcap: float = 0.0
    output_layernorm: bool = False
    parallel_attention_mlp: bool = False
    apply_residual_connection_post_layernorm: bool = False
    attn_input_format: str = "sbhd"
    tp_group: Any = None
    tp_size: int = 1
    sequence_parallel: bool = False


LAYER_RULES: dict[str, Rule] = {
    "layer_type": checked(partial(check_option, allowed=LayerTypes)),
}


def check_layer_options(
    layer_type: str,
    parallel: bool,
    post_norm_residual: bool,
    output_layernorm: bool,
    attn_input_format: str,
    drop_path_rate: float,
) -> None:
    """Check constructor options that exclude each other.

    Raises:
        ValueError: parallel_attention_mlp is combined with an option that it cannot be combined with.
    """
    if parallel and (layer_type != "encoder" or post_norm_residual or output_layernorm):
        raise ValueError(
            "parallel_attention_mlp=True is for layer_type='encoder' without "
            "apply_residual_connection_post_layernorm and output_layernorm; leave those out"
        )
    if drop_path_rate > 0.0 and attn_input_format == "thd":
        warn_once(
            "drop_path_rate with thd",
            f"drop_path_rate={drop_path_rate} with attn_input_format='thd' drops single tokens: packed sequences have "
            "no axis of samples. Use sbhd or bshd to drop whole samples",
        )

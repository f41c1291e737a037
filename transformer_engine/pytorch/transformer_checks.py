"""Checks on transformer layers: which variants there are, and arguments that a variant does not read."""

from __future__ import annotations

from typing import Any

from ..common.checks import one_of, whole_or_none
from .attention.dot_product_attention.arguments import RULES
from .constants import LayerTypes
from .module.arguments import window


def check_unused(mask_type: Any, window_size: Any, max_seqlen_kv: Any) -> None:
    """TypeError or ValueError for arguments of a cross attention that this layer lacks, where they are none at all."""
    if mask_type is not None:
        RULES["enc_dec_attn_mask_type"]("enc_dec_attn_mask_type", mask_type)
    window("enc_dec_window_size", window_size)
    whole_or_none("max_seqlen_kv", max_seqlen_kv, 0)


def check_variant(
    layer_type: str,
    parallel: bool,
    post_norm_residual: bool,
    output_layernorm: bool,
    attn_input_format: str,
    drop_path_rate: float,
) -> None:
    """ValueError for options of a constructor that exclude each other."""
    one_of("layer_type", layer_type, LayerTypes)
    if parallel and (layer_type != "encoder" or post_norm_residual or output_layernorm):
        raise ValueError(
            "parallel_attention_mlp=True is for layer_type='encoder' without "
            "apply_residual_connection_post_layernorm and output_layernorm; leave those out"
        )
    if drop_path_rate > 0.0 and attn_input_format == "thd":
        raise ValueError(
            f"drop_path_rate={drop_path_rate} with attn_input_format='thd', which has no axis of samples; "
            "use sbhd or bshd"
        )

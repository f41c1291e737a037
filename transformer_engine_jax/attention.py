"""Which backend takes an attention, asked by the enumerations of the headers."""

from __future__ import annotations

from transformer_engine.common.attention_enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)  # fmt: skip
from transformer_engine.common.checks import described
from transformer_engine.common.dtypes import DType
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from transformer_engine.jax.cpp_extensions.attention import FusedAttnHelper

from .enums import NVTE_Fused_Attn_Backend

_NAMES = {DType.kFloat32: "float32", DType.kFloat16: "float16", DType.kBFloat16: "bfloat16"}
_LAYOUTS = {NVTE_QKV_Layout[f"NVTE_{layout.name}"]: layout for layout in QKVLayout}
_WITHOUT_COUNTS = str.maketrans("", "", "23")  # they say that arrays are interleaved


def nvte_get_qkv_format(qkv_layout: NVTE_QKV_Layout) -> NVTE_QKV_Format:
    """The order of axes of queries and, where it is another, of keys and values."""
    name = NVTE_QKV_Layout(qkv_layout).name.translate(_WITHOUT_COUNTS)
    orders = [part for part in name.split("_") if part not in ("NVTE", "Paged", "KV")]
    query, key = orders[0], orders[-1]
    return NVTE_QKV_Format[f"NVTE_{query}" if query == key else f"NVTE_{query}_2{key}"]


def get_fused_attn_backend(
    is_training: bool, q_dtype: DType, kv_dtype: DType, qkv_layout: NVTE_QKV_Layout, bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type, softmax_type: NVTE_Softmax_Type, dropout_probability: float,
    q_attn_heads: int, kv_attn_heads: int, q_max_seqlen: int, kv_max_seqlen: int, qk_head_dim: int, v_head_dim: int,
    window_size_left: int = -1, window_size_right: int = -1, deterministic: bool = False,
) -> NVTE_Fused_Attn_Backend:  # fmt: skip
    """The kind of backend other than the reference that takes such a call, NVTE_No_Backend where none does.

    No backend of JAX's side adds ALiBi biases by themselves: NVTE_ALIBI has none.
    deterministic: every backend repeats its bits, or is refused where they must not differ (docs/environment.md).
    """
    if qkv_layout not in _LAYOUTS:
        raise ValueError(
            f"qkv_layout={described(qkv_layout)}; choose one of {', '.join(layout.name for layout in _LAYOUTS)}"
        )
    for name, value, kind in (
        ("bias_type", bias_type, NVTE_Bias_Type), ("attn_mask_type", attn_mask_type, NVTE_Mask_Type),
        ("softmax_type", softmax_type, NVTE_Softmax_Type),
    ):  # fmt: skip
        if value not in [*kind]:
            raise ValueError(f"{name}={described(value)}; choose one of {', '.join(kind.__members__)}")
    if q_dtype not in _NAMES or kv_dtype not in _NAMES or bias_type == NVTE_Bias_Type.NVTE_ALIBI:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
    helper = FusedAttnHelper(
        is_training, _NAMES[q_dtype], _NAMES[kv_dtype], _LAYOUTS[qkv_layout], AttnBiasType(int(bias_type)),
        AttnMaskType(int(attn_mask_type)), AttnSoftmaxType(int(softmax_type)), dropout_probability, q_attn_heads,
        kv_attn_heads, q_max_seqlen, kv_max_seqlen, qk_head_dim, v_head_dim, (window_size_left, window_size_right),
    )  # fmt: skip
    return NVTE_Fused_Attn_Backend(helper.get_fused_attn_backend())

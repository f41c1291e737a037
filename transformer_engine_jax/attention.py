"""Queries of attention backends by the enumerations of the headers."""

from __future__ import annotations

from numbers import Integral

from transformer_engine.common.checks import described
from transformer_engine.common.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from transformer_engine.jax.cpp_extensions.attention import FusedAttnHelper

from .enums import NVTE_Fused_Attn_Backend

_NAMES = {DType.kFloat32: "float32", DType.kFloat16: "float16", DType.kBFloat16: "bfloat16"}
_LAYOUTS = {NVTE_QKV_Layout[f"NVTE_{layout.name}"]: layout for layout in QKVLayout}
_WITHOUT_COUNTS = str.maketrans("", "", "23")  # the numbers of interleaved arrays


def nvte_get_qkv_format(qkv_layout: NVTE_QKV_Layout) -> NVTE_QKV_Format:
    """Return the order of axes of queries and, if it differs, of keys and values.

    Args:
        qkv_layout: Layout, or its integer.

    Raises:
        ValueError: qkv_layout is not a member of NVTE_QKV_Layout.
    """
    if not isinstance(qkv_layout, Integral) or int(qkv_layout) not in {*NVTE_QKV_Layout}:
        raise ValueError(
            f"qkv_layout={described(qkv_layout)} is not a layout; pass a member of NVTE_QKV_Layout"
        )
    name = NVTE_QKV_Layout(int(qkv_layout)).name.translate(_WITHOUT_COUNTS)
    orders = [part for part in name.split("_") if part not in ("NVTE", "Paged", "KV")]
    query, key = orders[0], orders[-1]
    return NVTE_QKV_Format[f"NVTE_{query}" if query == key else f"NVTE_{query}_2{key}"]


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: DType,
    kv_dtype: DType,
    qkv_layout: NVTE_QKV_Layout,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    dropout_probability: float,
    q_attn_heads: int,
    kv_attn_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    qk_head_dim: int,
    v_head_dim: int,
    window_size_left: int = -1,
    window_size_right: int = -1,
    deterministic: bool = False,
) -> NVTE_Fused_Attn_Backend:
    """Return the kind of backend, other than the reference, that supports an attention call.

    The sizes are those of query, key and value. Attention with ALiBi or with dtypes other than float32, float16 and
    bfloat16 has no such backend. `deterministic` does not change the result: NVTE_ALLOW_NONDETERMINISTIC_ALGO
    controls which backends are supported (docs/environment.md).

    Returns:
        NVTE_F16_arbitrary_seqlen, or NVTE_No_Backend.

    Raises:
        ValueError: An enumeration has no such member, or qkv_layout is a layout that transformer_engine.jax does not
            support.
    """
    if not isinstance(qkv_layout, Integral) or int(qkv_layout) not in _LAYOUTS:
        raise ValueError(
            f"qkv_layout={described(qkv_layout)}; choose one of {', '.join(layout.name for layout in _LAYOUTS)}"
        )
    for name, value, kind in (
        ("bias_type", bias_type, NVTE_Bias_Type),
        ("attn_mask_type", attn_mask_type, NVTE_Mask_Type),
        ("softmax_type", softmax_type, NVTE_Softmax_Type),
        ("q_dtype", q_dtype, DType),
        ("kv_dtype", kv_dtype, DType),
    ):
        if not isinstance(value, Integral) or int(value) not in {*kind}:
            raise ValueError(
                f"{name}={described(value)}; choose one of {', '.join(kind.__members__)}"
            )
    if q_dtype not in _NAMES or kv_dtype not in _NAMES or bias_type == NVTE_Bias_Type.NVTE_ALIBI:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
    helper = FusedAttnHelper(
        is_training,
        _NAMES[q_dtype],
        _NAMES[kv_dtype],
        _LAYOUTS[qkv_layout],
        AttnBiasType(int(bias_type)),
        AttnMaskType(int(attn_mask_type)),
        AttnSoftmaxType(int(softmax_type)),
        dropout_probability,
        q_attn_heads,
        kv_attn_heads,
        q_max_seqlen,
        kv_max_seqlen,
        qk_head_dim,
        v_head_dim,
        (window_size_left, window_size_right),
    )
    return NVTE_Fused_Attn_Backend(helper.get_fused_attn_backend())

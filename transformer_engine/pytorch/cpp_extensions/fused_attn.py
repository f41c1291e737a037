"""fused_attn_fwd and fused_attn_bwd with layouts, masks, biases and softmaxes by name, and default arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import transformer_engine_torch as tex
from transformer_engine_torch import (
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine_torch.checks import member, with_axes

from ...common.checks import check_option, drop_rate, number_or_none, switch
from ..compat.argument_orders import accepts_older_orders
from ..constants import TE_DType
from ..runtime.checks import floating


def _member_names(kind: Any) -> dict[str, Any]:
    """{"bshd": NVTE_BSHD, ..}: enumeration members by their name suffix."""
    return {member.name.removeprefix("NVTE_").lower(): member for member in kind}


QKVFormat = {
    name: member for name, member in _member_names(NVTE_QKV_Format).items() if "not_set" not in name
}
QKVLayout = _member_names(NVTE_QKV_Layout)
AttnBiasType = {
    "no_bias": NVTE_Bias_Type.NVTE_NO_BIAS,
    "pre_scale_bias": NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS,
    "post_scale_bias": NVTE_Bias_Type.NVTE_POST_SCALE_BIAS,
    "alibi": NVTE_Bias_Type.NVTE_ALIBI,
}
AttnMaskType = {
    "no_mask": NVTE_Mask_Type.NVTE_NO_MASK,
    "padding": NVTE_Mask_Type.NVTE_PADDING_MASK,
    "causal": NVTE_Mask_Type.NVTE_CAUSAL_MASK,
    "padding_causal": NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    "causal_bottom_right": NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    "padding_causal_bottom_right": NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}
SoftmaxType = {
    "vanilla": NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    "off-by-one": NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX,
    "learnable": NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX,
}
FusedAttnBackend = {
    "F16_max512_seqlen": NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen,
    "F16_arbitrary_seqlen": NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
    "FP8": NVTE_Fused_Attn_Backend.NVTE_FP8,
    "No_Backend": NVTE_Fused_Attn_Backend.NVTE_No_Backend,
}

# Slots for an attention's tensors in its module's scaling state.
META_QKV = FP8FwdTensors.GEMM1_OUTPUT
META_O = FP8FwdTensors.GEMM2_INPUT
META_S = FP8FwdTensors.GEMM3_OUTPUT
META_DQKV = FP8BwdTensors.GRAD_OUTPUT1
META_DO = FP8BwdTensors.GRAD_INPUT2
META_DP = FP8BwdTensors.GRAD_INPUT3


class _Own(str):
    """Default for an axis order or a layout: as in q, k and v, which is the text for the default layout."""

    __slots__ = ()


_ORDER: Any = _Own("sbhd")
_LAYOUT: Any = _Own("sbh3d")


@accepts_older_orders(v2_11=("o_format", "qkv_scale_inv_format"))
def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Any,
    k: Any,
    v: Any,
    fake_dtype: torch.dtype,
    fused_attention_backend: NVTE_Fused_Attn_Backend | int,
    attn_bias: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    s_quantizer: Any = None,
    o_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: Literal["sbhd", "bshd", "bhsd", "thd"] | None = _ORDER,
    qkv_scale_inv_format: Literal["sbhd", "bshd", "bhsd", "thd"] | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    rng_gen: torch.Generator | None = None,
    softmax_offset: Tensor | None = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
    bottom_right_diagonal: bool | None = None,
) -> tuple[Any, ...]:
    """Compute attention without autograd; see `transformer_engine_torch.fused_attn_fwd`.

    Args:
        attn_scale: Score factor; 1 / sqrt(head size) by default.
        dropout: Dropout probability; 0 unless is_training.
        o_format: Output axis order, "sbhd", "bshd", "bhsd" or "thd"; by default the queries'.
        qkv_scale_inv_format: Has no effect; scales are read with their tensors.

    Returns:
        The output, the tensors for `fused_attn_bwd`, and with return_max_logit the largest logit of each head [h].
    """
    _check(fused_attention_backend)
    switch("is_training", is_training)
    drop_rate("dropout", dropout)
    _check_heads(q, k, v)
    number_or_none("attn_scale", attn_scale)
    output, *rest = tex.fused_attn_fwd(
        max_seqlen_q,
        max_seqlen_kv,
        is_training,
        q.shape[-1] ** -0.5 if attn_scale is None else attn_scale,
        dropout if is_training else 0.0,
        fast_zero_fill,
        *_enums(qkv_layout, attn_bias_type, attn_mask_type, softmax_type),
        window_size,
        cu_seqlens_q,
        cu_seqlens_kv,
        q,
        k,
        v,
        fake_dtype,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        page_table_k,
        page_table_v,
        s_quantizer,
        o_quantizer,
        attn_bias,
        softmax_offset,
        rng_gen,
        0,
        return_max_logit,
        cuda_graph,
        bottom_right_diagonal=bottom_right_diagonal,
        o_format=None if o_format is _ORDER else o_format,
        qkv_scale_inv_format=qkv_scale_inv_format,
    )
    if not return_max_logit:
        return output, rest
    max_logit = rest.pop(1)
    return output, rest, max_logit


@accepts_older_orders(v2_11=(("dqkv_dtype", 10), "o_format", "do_format", "dqkv_layout"))
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    d_o: Any,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: Sequence[Tensor],
    fused_attention_backend: NVTE_Fused_Attn_Backend | int,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    s_quantizer: Any = None,
    dp_quantizer: Any = None,
    dqkv_quantizer: Any = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: Literal["sbhd", "bshd", "bhsd", "thd"] | None = _ORDER,
    do_format: Literal["sbhd", "bshd", "bhsd", "thd"] | None = _ORDER,
    dqkv_layout: str | None = _LAYOUT,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    cuda_graph: bool = False,
    bottom_right_diagonal: bool | None = None,
    qkv_scale_inv_format: str | None = None,
    do_scale_inv_format: str | None = None,
    dqkv_dtype: torch.dtype | DType | int | None = None,
) -> list[Any]:
    """Compute the gradients of `fused_attn_fwd`; see `transformer_engine_torch.fused_attn_bwd`.

    Args:
        o_format: Axis order of `o`; by default as for the queries.
        do_format: Axis order of `d_o`; by default as for the queries.
        dqkv_layout: Gradient layout; by default qkv_layout.
        qkv_scale_inv_format, do_scale_inv_format: Have no effect; scales are read with their tensors.
        dqkv_dtype: Gradient dtype, a torch dtype or a DType; by default fake_dtype.

    Returns:
        [dq, dk, dv, dbias or None, dsoftmax_offset or None].
    """
    _check(fused_attention_backend)
    drop_rate("dropout", dropout)
    _check_heads(q, k, v)
    number_or_none("attn_scale", attn_scale)
    return tex.fused_attn_bwd(
        max_seqlen_q,
        max_seqlen_kv,
        q.shape[-1] ** -0.5 if attn_scale is None else attn_scale,
        dropout,
        fast_zero_fill,
        *_enums(qkv_layout, attn_bias_type, attn_mask_type, softmax_type),
        window_size,
        deterministic,
        cu_seqlens_q,
        cu_seqlens_kv,
        q,
        k,
        v,
        o,
        d_o,
        fake_dtype,
        TE_DType[dqkv_dtype] if isinstance(dqkv_dtype, torch.dtype) else dqkv_dtype,
        aux_ctx_tensors,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        s_quantizer,
        dp_quantizer,
        dqkv_quantizer,
        cuda_graph,
        bottom_right_diagonal=bottom_right_diagonal,
        o_format=None if o_format is _ORDER else o_format,
        do_format=None if do_format is _ORDER else do_format,
        dqkv_layout=None
        if dqkv_layout is None or dqkv_layout is _LAYOUT
        else _one(QKVLayout, "dqkv_layout", dqkv_layout.lower()),
        qkv_scale_inv_format=qkv_scale_inv_format,
        do_scale_inv_format=do_scale_inv_format,
    )


def _check(backend: NVTE_Fused_Attn_Backend | int) -> None:
    checked = member("fused_attention_backend", NVTE_Fused_Attn_Backend, backend)
    if checked == NVTE_Fused_Attn_Backend.NVTE_No_Backend:
        raise ValueError(
            f"fused_attention_backend is No_Backend ({checked.name}); ask get_fused_attn_backend for one that does"
        )


def _check_heads(q: Any, k: Any, v: Any) -> None:
    """Raise an error unless these are tensors, plain or quantized, before their head sizes are read."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "get_usages"):
            floating(name, x)
            with_axes(name, x, 3)


def _enums(
    qkv_layout: str, attn_bias_type: str, attn_mask_type: str, softmax_type: str
) -> tuple[Any, Any, Any, Any]:
    """Return the names in a call as the extension's enumerations, in argument order."""
    return (
        _one(
            QKVLayout,
            "qkv_layout",
            qkv_layout.lower() if isinstance(qkv_layout, str) else qkv_layout,
        ),
        _one(AttnBiasType, "attn_bias_type", attn_bias_type),
        _one(AttnMaskType, "attn_mask_type", attn_mask_type),
        _one(SoftmaxType, "softmax_type", softmax_type),
    )


def _one(names: dict[str, Any], argument: str, name: str) -> Any:
    check_option(argument, name, names)
    return names[name]

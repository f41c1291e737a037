"""Attention under the extension's names: fused_attn_fwd and fused_attn_bwd as plain calls, without autograd.

The backend is chosen as for DotProductAttention, from backends with two separate passes. The forward pass on
FP8 codes runs an FP8 attention backend; the backward pass widens them, as DotProductAttention does by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.numbers import to_float, with_article
from transformer_engine.pytorch.attention.dot_product_attention.arguments import check_bias
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    NVTE_Fused_Attn_Backend,
    fused_attention_support,
)
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.primitives.attention.call import (
    Attended,
    AttentionCall,
    AttentionInputs,
)
from transformer_engine.pytorch.primitives.attention.choose import choose_passes
from transformer_engine.pytorch.primitives.attention.mask import NAMES as MASKS
from transformer_engine.pytorch.primitives.attention.mask import resolve as resolve_mask
from transformer_engine.pytorch.primitives.attention.visible import default_slopes
from transformer_engine.pytorch.runtime.warn_once import warn_once

from . import fp8_attention
from .attention_checks import check_call, check_question, whole_window
from .attention_sequences import describe_sequences
from .cast import torch_dtype
from .checks import member, quantizer_or_none
from .enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from .layout import Layout, reorder_axes, requested_order

__all__ = [
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_fused_attn_backend",
]

_BIASES = dict(
    zip(NVTE_Bias_Type, ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"), strict=True)
)
_MASKS = dict(zip(NVTE_Mask_Type, MASKS[:-1], strict=True))  # "arbitrary" has no number
_SOFTMAXES = dict(zip(NVTE_Softmax_Type, ("vanilla", "off-by-one", "learnable"), strict=True))


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout | int,
    bias_type: NVTE_Bias_Type | int,
    attn_mask_type: NVTE_Mask_Type | int,
    softmax_type: NVTE_Softmax_Type | int,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Any,
    K: Any,
    V: Any,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    s_quantizer: Any = None,
    o_quantizer: Any = None,
    Bias: Tensor | None = None,
    SoftmaxOffset: Tensor | None = None,
    rng_gen: torch.Generator | None = None,
    rng_elts_per_thread: int = 0,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
    *,
    bottom_right_diagonal: bool | None = None,
    o_format: NVTE_QKV_Format | int | str | None = None,
    qkv_scale_inv_format: NVTE_QKV_Format | int | str | None = None,
) -> list[Any]:
    """Scaled dot-product attention: [O, lse, (max_logit,) rng_state, (Bias,) (SoftmaxOffset)].

    `O` [.., h, d_v] has the order `o_format`. `lse` is float32 [b, h, s_q, 1], or [t, h, 1] for packed tokens: the
    logarithm of the softmax denominator. `max_logit` is float32 [h]. `rng_state` int64 [2] is dropout's
    (seed, offset). `fused_attn_bwd` reads all results after `O` except max_logit.

    Raises:
        ValueError: Lengths or pages do not fit the tensors. Those on a GPU are checked with TE_CHECK=1 only.
    """
    layout = Layout.of(member("qkv_layout", NVTE_QKV_Layout, qkv_layout))
    own, wanted = (
        requested_order(None, layout, "o_format"),
        requested_order(o_format, layout, "o_format"),
    )
    _warn_of_scale_formats("fused_attn_fwd", qkv_scale_inv_format=qkv_scale_inv_format)
    quantizer_or_none(o_quantizer, "o_quantizer")
    call, inputs = _call(
        layout,
        (max_seqlen_q, max_seqlen_kv),
        is_training,
        attn_scale,
        p_dropout,
        (bias_type, attn_mask_type, softmax_type),
        window_size,
        (cu_seqlens_q, cu_seqlens_kv),
        (Q, K, V),
        fake_dtype,
        (cu_seqlens_q_padded, cu_seqlens_kv_padded),
        page_table_k if page_table_k is not None else page_table_v,
        Bias,
        SoftmaxOffset,
        return_max_logit,
        bottom_right_diagonal,
    )
    output: Any
    if fp8_attention.takes_codes(layout, Q, K, V):
        codes = inputs._replace(q=Q, k=K, v=V)
        output, attended = fp8_attention.forward(call, codes, s_quantizer, o_quantizer)
        output = fp8_attention.reorder_codes(output, own, wanted)
    else:
        attended = choose_passes(call).forward(call, inputs)
        output = reorder_axes(layout.as_queries(attended.output), own, wanted, "o_format")
        if o_quantizer is not None:
            output = o_quantizer(output.contiguous())
    device = inputs.q.device
    lse = (
        torch.empty(0, dtype=torch.float32, device=device) if attended.lse is None else attended.lse
    )
    state = attended.rng_state
    results = [
        output,
        lse.t().unsqueeze(-1) if call.packed and lse.dim() == 2 else lse.unsqueeze(-1),
    ]
    if return_max_logit:
        results.append(attended.max_logit)
    results.append(torch.zeros(2, dtype=torch.int64, device=device) if state is None else state)
    return results + [extra for extra in (inputs.bias, SoftmaxOffset) if extra is not None]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout | int,
    bias_type: NVTE_Bias_Type | int,
    attn_mask_type: NVTE_Mask_Type | int,
    softmax_type: NVTE_Softmax_Type | int,
    window_size: Sequence[int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Any,
    K: Any,
    V: Any,
    O: Any,  # noqa: E741  the name callers know
    dO: Any,
    fake_dtype: torch.dtype,
    dqkv_type: DType | int | None,
    Aux_CTX_Tensors: Sequence[Tensor],
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    s_quantizer: Any = None,
    dp_quantizer: Any = None,
    dqkv_quantizer: Any = None,
    cuda_graph: bool = False,
    *,
    bottom_right_diagonal: bool | None = None,
    o_format: NVTE_QKV_Format | int | str | None = None,
    do_format: NVTE_QKV_Format | int | str | None = None,
    dqkv_layout: NVTE_QKV_Layout | int | None = None,
    qkv_scale_inv_format: NVTE_QKV_Format | int | str | None = None,
    do_scale_inv_format: NVTE_QKV_Format | int | str | None = None,
) -> list[Any]:
    """Return [dQ, dK, dV, dBias or None, dSoftmaxOffset or None] of `fused_attn_fwd` for the gradient dO."""
    layout = Layout.of(member("qkv_layout", NVTE_QKV_Layout, qkv_layout))
    own = requested_order(None, layout, "o_format")
    orders = (
        requested_order(o_format, layout, "o_format"),
        requested_order(do_format, layout, "do_format"),
    )
    into = (
        layout
        if dqkv_layout is None
        else Layout.of(member("dqkv_layout", NVTE_QKV_Layout, dqkv_layout))
    )
    _warn_of_scale_formats(
        "fused_attn_bwd",
        qkv_scale_inv_format=qkv_scale_inv_format,
        do_scale_inv_format=do_scale_inv_format,
    )
    lse, state, *extras = Aux_CTX_Tensors
    has_bias = NVTE_Bias_Type(bias_type) in (
        NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS,
        NVTE_Bias_Type.NVTE_POST_SCALE_BIAS,
    )
    bias = extras.pop(0) if has_bias else None
    offset = extras.pop(0) if extras else None
    call, inputs = _call(
        layout,
        (max_seqlen_q, max_seqlen_kv),
        is_training=True,
        scale=attn_scale,
        dropout=p_dropout,
        kinds=(bias_type, attn_mask_type, softmax_type),
        window=window_size,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_kv),
        qkv=(Q, K, V),
        dtype=fake_dtype,
        starts=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        page_table=None,
        bias=bias,
        offset=offset,
        max_logit=False,
        bottom_right=bottom_right_diagonal,
    )
    call = replace(
        call, deterministic=call.deterministic or deterministic, bias_gradient=bias is not None
    )
    attended = Attended(
        layout.queries(reorder_axes(_wide(O, fake_dtype), orders[0], own, "o_format")).contiguous(),
        lse.squeeze(-1).t() if call.packed and lse.dim() == 3 else lse.squeeze(-1),
        state if p_dropout > 0.0 else None,
    )
    grad_output = layout.queries(
        reorder_axes(_wide(dO, fake_dtype), orders[1], own, "do_format")
    ).contiguous()
    input_gradients = choose_passes(call).backward(call, inputs, attended, grad_output)
    dtype = fake_dtype if dqkv_type is None else TE_DType_To_Torch.get(DType(dqkv_type), fake_dtype)
    wanted = dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else fake_dtype
    formats = (into.q_format, into.kv_format, into.kv_format)
    grad_tensors = [
        reorder_axes(x.to(wanted), source, target, "dqkv_layout")
        for x, source, target in zip(
            input_gradients[:3],
            (layout.q_format, layout.kv_format, layout.kv_format),
            formats,
            strict=True,
        )
    ]
    gradients: list[Any] = list(into.packed(*grad_tensors))
    if dqkv_quantizer is not None:
        gradients = [dqkv_quantizer(x.contiguous()) for x in gradients]
    offset_gradient = None
    if offset is not None and call.softmax == "learnable":
        assert input_gradients.sink is not None
        offset_gradient = input_gradients.sink.reshape(offset.shape)
    return [*gradients, input_gradients.bias, offset_gradient]


def _warn_of_scale_formats(function: str, **formats: NVTE_QKV_Format | int | str | None) -> None:
    """Warn once about a scale format, which has no effect."""
    for name, value in formats.items():
        if value is not None:
            warn_once(
                f"{function}: {name}",
                f"{name}={value!r} has no effect: {function} reads the scales of a tensor with the tensor, whatever "
                "order they are stored in",
                stacklevel=4,
            )


def get_fused_attn_backend(
    fused_attn_params: Any = None, *former: Any, **former_by_name: Any
) -> Any:
    """Select the fused attention that supports a call, with the reason if none does.

    Args:
        fused_attn_params: The call's AttentionParams; or is_training, the first argument in release 2.11.
        former: The other arguments in release 2.11, up to deterministic.
        former_by_name: Release 2.11 arguments by name.

    Returns:
        `(kind, reason)`. The reason is empty unless the kind is NVTE_No_Backend. Only the kind for arguments as in
        release 2.11.

    Raises:
        TypeError: The only argument is not an AttentionParams.
    """
    if former or former_by_name:
        first = () if "is_training" in former_by_name else (fused_attn_params,)
        return _fused_kind(*first, *former, **former_by_name)
    if not isinstance(fused_attn_params, AttentionParams):
        raise TypeError(
            f"fused_attn_params is {with_article(type(fused_attn_params))}; pass an AttentionParams of "
            "transformer_engine.pytorch.attention.dot_product_attention.utils"
        )
    return fused_attention_support(fused_attn_params)


def _fused_kind(
    is_training: bool,
    q_dtype: DType | int,
    kv_dtype: DType | int,
    qkv_layout: NVTE_QKV_Layout | int,
    bias_type: NVTE_Bias_Type | int,
    attn_mask_type: NVTE_Mask_Type | int,
    softmax_type: NVTE_Softmax_Type | int,
    p_dropout: float,
    num_attn_heads: int,
    num_gqa_groups: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size_left: int,
    window_size_right: int,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
    deterministic: bool = False,
) -> NVTE_Fused_Attn_Backend:
    """Fused attention that supports a call with release 2.11 arguments; NVTE_No_Backend if none does."""
    dtype = torch_dtype(member("q_dtype", DType, q_dtype))
    check_question(
        {
            "num_attn_heads": num_attn_heads,
            "num_gqa_groups": num_gqa_groups,
            "head_dim_qk": head_dim_qk,
            "head_dim_v": head_dim_v,
        },
        {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv},
        p_dropout,
        (window_size_left, window_size_right),
    )
    fp8 = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if member("kv_dtype", DType, kv_dtype) != DType(q_dtype):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
    mask = _MASKS[member("attn_mask_type", NVTE_Mask_Type, attn_mask_type)]
    params = AttentionParams(
        qkv_dtype=torch.bfloat16 if fp8 else dtype,
        qkv_layout=Layout.of(member("qkv_layout", NVTE_QKV_Layout, qkv_layout)).name,
        num_heads=num_attn_heads,
        num_gqa_groups=num_gqa_groups,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        attn_mask_type=mask,
        # As in `fused_attn_fwd`, a causal mask closes the right side of an open window.
        window_size=(window_size_left, 0 if "causal" in mask else window_size_right),
        core_attention_bias_type=_BIASES[member("bias_type", NVTE_Bias_Type, bias_type)],
        attention_dropout=p_dropout,
        deterministic=deterministic,
        is_training=is_training,
        fp8=fp8,
        softmax_type=_SOFTMAXES[member("softmax_type", NVTE_Softmax_Type, softmax_type)],
        return_max_logit=return_max_logit,
        cuda_graph=cuda_graph,
    )
    return fused_attention_support(params)[0]


def _call(
    layout: Layout,
    max_seqlens: tuple[int, int],
    is_training: bool,
    scale: float,
    dropout: float,
    kinds: tuple[NVTE_Bias_Type | int, NVTE_Mask_Type | int, NVTE_Softmax_Type | int],
    window: Sequence[int],
    cu_seqlens: tuple[Tensor, Tensor],
    qkv: tuple[Any, Any, Any],
    dtype: torch.dtype,
    starts: tuple[Tensor | None, Tensor | None],
    page_table: Tensor | None,
    bias: Tensor | None,
    offset: Tensor | None,
    max_logit: bool,
    bottom_right: bool | None,
) -> tuple[AttentionCall, AttentionInputs]:
    """Return the call and its tensors, after every check."""
    scale, dropout = to_float("attn_scale", scale), to_float("p_dropout", dropout)
    left, right = whole_window(window)
    check_call(layout, qkv, cu_seqlens, scale, dropout, dtype, bias, offset)
    if layout.paged != (page_table is not None):
        raise ValueError(
            f"qkv_layout={layout.name!r} {'needs' if layout.paged else 'takes no'} page_table_k"
        )
    q = layout.queries(_wide(qkv[0], dtype))
    k, v = (layout.keys(_wide(x, dtype)) for x in qkv[1:])
    bias_name = _BIASES[member("bias_type", NVTE_Bias_Type, kinds[0])]
    has_bias = bias_name in ("pre_scale_bias", "post_scale_bias")
    if bias is not None and bias.numel() and not has_bias:
        warn_once(
            "attn_bias",
            f"attn_bias has no effect with bias type {bias_name!r}; set the type to 'post_scale_bias', or leave it out",
        )
    softmax = _SOFTMAXES[member("softmax_type", NVTE_Softmax_Type, kinds[2])]
    mask_name = _MASKS[member("attn_mask_type", NVTE_Mask_Type, kinds[1])]
    # Callers leave the right side of a causal window open; the mask closes it.
    mask = resolve_mask(mask_name, (left, 0 if "causal" in mask_name else right), bottom_right)
    sequences = describe_sequences(
        layout, mask.padding, q, k, cu_seqlens, starts, max_seqlens, page_table
    )
    sink = None if offset is None else offset.reshape(-1)
    if sink is None and softmax != "vanilla":
        sink = torch.zeros(q.shape[-2], dtype=torch.float32, device=q.device)
    lengths = (sequences.lengths_q, sequences.lengths_kv, sequences.starts_q, sequences.starts_kv)
    inputs = AttentionInputs(
        *(q, k, v, *lengths),
        bias=bias if has_bias else None,
        slopes=default_slopes(q.shape[-2], q.device) if bias_name == "alibi" else None,
        sink=sink,
        page_table=page_table,
    )
    call = AttentionCall.on(
        q.device.type,
        torch.are_deterministic_algorithms_enabled(),
        dtype=q.dtype,
        batch=sequences.batch,
        heads=q.shape[-2],
        groups=k.shape[-2],
        seqlen_q=sequences.max_q,
        seqlen_kv=sequences.max_kv,
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        q_format=layout.q_format,
        kv_format=layout.kv_format,
        page_size=k.shape[1] if layout.paged else 0,
        bias_shape=None if inputs.bias is None else inputs.bias.shape,
        slopes_shape=None if inputs.slopes is None else inputs.slopes.shape,
        mask=mask,
        scale=scale,
        bias=bias_name,
        softmax=softmax,
        dropout=dropout if is_training else 0.0,
        padded_between=sequences.padded_between,
        max_logit=max_logit,
        needs_gradient=is_training,
        bias_gradient=torch.is_grad_enabled()
        and inputs.bias is not None
        and inputs.bias.requires_grad,
        same_lengths=inputs.lengths_q is not None and inputs.lengths_q is inputs.lengths_kv,
        cached=layout.paged,
    )
    check_bias(call, inputs.bias)
    return call, inputs


def _wide(x: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor that is not quantized unchanged, and a quantized tensor dequantized to dtype."""
    return x.dequantize(dtype=dtype) if hasattr(x, "get_usages") else x

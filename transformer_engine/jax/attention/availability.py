"""Whether a kernel computes an attention: the arguments of `fused_attn` as shapes and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax.numpy as jnp

from ...common.checks import drop_rate, switch, whole
from ..primitives.attention import TABLE, AttentionRequest
from ..primitives.attention.enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    check_kinds,
)
from ..primitives.attention.masks import Window, check_window
from ..runtime.checks import check_dtype, is_symbolic
from ..runtime.platform import has_gpu

__all__ = ["is_fused_attn_kernel_available"]


def _with_former_arguments(function: Callable[..., bool]) -> Callable[..., bool]:
    """Decorate `is_fused_attn_kernel_available` to accept calls from releases that had no batch_size."""

    @functools.wraps(function)
    def is_fused_attn_kernel_available(is_training: bool, *arguments: Any, **options: Any) -> bool:
        first = arguments[0] if arguments else None
        if (
            arguments
            and first is not None
            and not isinstance(first, Integral)
            and not is_symbolic(first)
        ):
            arguments = (options.pop("batch_size", None), *arguments)  # begins with a dtype
        elif not arguments:
            options.setdefault("batch_size", None)
        return function(is_training, *arguments, **options)

    return is_fused_attn_kernel_available


@_with_former_arguments
def is_fused_attn_kernel_available(
    is_training: bool,
    batch_size: int | None,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: QKVLayout,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    softmax_type: AttnSoftmaxType,
    dropout_probability: float,
    q_num_heads: int,
    kv_num_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size: Window | None = None,
    return_max_logit: bool = False,
    bottom_right_diagonal: bool | None = None,
    bias_batch: int | None = None,
    bias_heads: int | None = None,
    bias_seqlen_q: int | None = None,
    bias_seqlen_kv: int | None = None,
    max_segments_per_seq: int | None = 1,
) -> bool:
    """Whether a backend other than the reference computes such a call on this machine.

    Calls without batch_size, by position too, are also accepted.

    Args:
        is_training: Whether the call has gradients.
        batch_size: Rows on each device; None or a symbolic number accepts any.
        q_dtype: Query dtype.
        kv_dtype: Key and value dtype.
        q_num_heads: Query heads.
        kv_num_heads: Key and value heads.
        q_max_seqlen: Query length; None accepts symbolic lengths.
        kv_max_seqlen: Key length.
        head_dim_qk: Query and key head size.
        head_dim_v: Value head size.
        return_max_logit: Whether the call returns the largest logits.
        bottom_right_diagonal: Has no effect; the mask type states the diagonal.
        bias_batch: Has no effect, like the other bias extents: backends support every bias that broadcasts.
        bias_heads: See bias_batch.
        bias_seqlen_q: See bias_batch.
        bias_seqlen_kv: See bias_batch.
        max_segments_per_seq: Most sequences in a packed row; None or a symbolic number counts as 1.

    The other arguments are as in `fused_attn`.
    """
    check_kinds(attn_bias_type, attn_mask_type, qkv_layout, softmax_type)
    switch("is_training", is_training)
    switch("return_max_logit", return_max_logit)
    drop_rate("dropout_probability", dropout_probability)
    for name, extent in (
        ("q_num_heads", q_num_heads),
        ("kv_num_heads", kv_num_heads),
        ("q_max_seqlen", q_max_seqlen),
        ("kv_max_seqlen", kv_max_seqlen),
        ("head_dim_qk", head_dim_qk),
        ("head_dim_v", head_dim_v),
    ):
        if not is_symbolic(extent):
            whole(name, extent, 0)
    for name, extent in (
        ("batch_size", batch_size),
        ("max_segments_per_seq", max_segments_per_seq),
    ):
        if extent is not None and not is_symbolic(extent):
            whole(name, extent, 0)
    if check_dtype("q_dtype", q_dtype) != check_dtype("kv_dtype", kv_dtype):
        return False
    if is_symbolic(q_max_seqlen) or is_symbolic(kv_max_seqlen):
        return False
    request = AttentionRequest(
        jnp.dtype(q_dtype),
        qkv_layout,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        dropout_probability,
        q_num_heads,
        kv_num_heads,
        q_max_seqlen,
        kv_max_seqlen,
        head_dim_qk,
        head_dim_v,
        check_window(window_size),
        is_training,
        "cuda" if has_gpu() else "cpu",
        segments=1
        if max_segments_per_seq is None or is_symbolic(max_segments_per_seq)
        else max_segments_per_seq,
        batch=1 if batch_size is None or is_symbolic(batch_size) else batch_size,
        max_logit=return_max_logit,
    )
    return any(
        b.name != "reference" and b.rejection_reason(request) is None
        for b in TABLE.candidates(request)
    )

"""fused_attn: attention of query, key and value in any layout, with masks, biases, windows and sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...common.checks import described, drop_rate, number, whole
from ...common.dispatch import Backend, Table
from ..checks import check_values
from ..primitives.platforms import chosen
from . import reference
from .descriptor import SequenceDescriptor
from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from .masks import Window, check_window, hidden_keys
from .request import AttentionRequest

__all__ = ["TABLE", "fused_attn", "is_fused_attn_kernel_available"]

TABLE: Table[AttentionRequest] = Table(
    "jax_attention", (Backend("reference", bind=lambda request: reference.attend),)
)


def fused_attn(
    qkv: tuple[Array, ...],
    bias: Array | None,
    sequence_descriptor: SequenceDescriptor | Array | None,
    seed: Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: Window | None = None,
    context_checkpoint_name: str = "context",
    softmax_offset: Array | None = None,
) -> Array:
    """out [b, q, h, dv] in query's dtype.

    qkv                  one array [b, s, 3, h, d], two [b, q, h, d] and [b, k, 2, g, d], or three; g divides h
    bias                 [1 or b, 1 or h, q, k], differentiable
    sequence_descriptor  which tokens belong together; or a mask, True hides a key; None: each row is one sequence
    seed                 a key of jax.random, for dropout
    softmax_offset       [1, h, 1, 1], differentiable, of LEARNABLE_SOFTMAX
    Rows of tokens that belong to no sequence, and rows that see no key, are zero.
    """
    query, key, value = separated(qkv, qkv_layout)
    check_attention(query, key, value, bias, attn_bias_type, dropout_probability, scaling_factor)
    whole("max_segments_per_seq", max_segments_per_seq)
    window = check_window(window_size)
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    hidden = hidden_of(sequence_descriptor, attn_mask_type, qkv_layout, window, (batch, queries, keys))
    request = _request(query, key, value, qkv_layout, attn_bias_type, attn_mask_type, softmax_type)
    request = request._replace(dropout=dropout_probability, window=window, training=is_training)
    calls = chosen(TABLE, lambda platform: request._replace(platform=platform))
    dropped = None
    if is_training and dropout_probability > 0:
        if seed is None:
            raise ValueError(
                f"dropout_probability={dropout_probability} without a seed; give a key of jax.random"
            )
        dropped = dropout_of(seed, dropout_probability)
    run = calls["cpu"]
    assert all(call is run for call in calls.values()), "every platform has one backend so far"
    sink = sink_of(softmax_type, softmax_offset, heads)
    out = run(query, key, value, bias, attn_bias_type, hidden, scaling_factor, sink, dropped)
    return checkpoint_name(out, context_checkpoint_name)


def is_fused_attn_kernel_available(
    is_training: bool,
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
) -> bool:
    """Would another backend than the reference take such a call on this machine?"""
    if q_dtype != kv_dtype:
        return False
    request = AttentionRequest(
        jnp.dtype(q_dtype), qkv_layout, attn_bias_type, attn_mask_type, softmax_type, dropout_probability,
        q_num_heads, kv_num_heads, q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v, check_window(window_size),
        is_training, "cuda",
    )  # fmt: skip
    return any(b.name != "reference" and b.refusal(request) is None for b in TABLE.candidates(request))


def separated(qkv: tuple[Array, ...], layout: QKVLayout) -> tuple[Array, Array, Array]:
    """query, key and value [b, s, heads, d] of the arrays that a layout has."""
    if not isinstance(qkv, (tuple, list)):
        raise TypeError(f"qkv={described(qkv)}; give a tuple of one, two or three arrays")
    wanted = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
    if len(qkv) != wanted:
        raise ValueError(f"qkv has {len(qkv)} arrays; qkv_layout={layout.name} has {wanted}")
    axes = {1: (5,), 2: (4, 5), 3: (4, 4, 4)}[wanted]
    for array, ndim in zip(qkv, axes, strict=True):
        if array.ndim != ndim:
            raise ValueError(f"an array of {layout.name} has shape {array.shape}; it must have {ndim} axes")
    packed = {1: 3, 2: 2}.get(wanted)
    if packed is not None and qkv[-1].shape[2] != packed:
        raise ValueError(
            f"the packed array of {layout.name} has shape {qkv[-1].shape}; axis 2 must be {packed}"
        )
    if layout.is_qkvpacked():
        return tuple(qkv[0][:, :, i] for i in range(3))  # pyright: ignore[reportReturnType]
    if layout.is_kvpacked():
        return qkv[0], qkv[1][:, :, 0], qkv[1][:, :, 1]
    return qkv[0], qkv[1], qkv[2]


def check_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    bias_type: AttnBiasType,
    dropout: float,
    scale: float,
) -> None:
    """ValueError or TypeError unless arrays and options fit together."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_values(name, array)
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape}; batches, tokens and heads of key and value, "
            "and the extents that query and key contract, must agree"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{key.shape[2]} heads of keys do not divide {query.shape[2]} heads of queries; make them"
        )
    drop_rate("dropout_probability", dropout)
    number("scaling_factor", scale)
    wants_bias = bias_type is not AttnBiasType.NO_BIAS
    if wants_bias is not (bias is not None):
        given = "None" if bias is None else f"an array of shape {bias.shape}"
        raise ValueError(
            f"attn_bias_type={bias_type.name} and bias={given}; give a bias with a type that adds one"
        )
    if bias is not None:
        full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        if bias.ndim != 4 or any(n not in (1, m) for n, m in zip(bias.shape, full, strict=True)):
            raise ValueError(f"bias has shape {bias.shape}; it must be {full}, or 1 in place of an extent")


def hidden_of(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    layout: QKVLayout,
    window: Window | None,
    extents: tuple[int, int, int],
) -> Array | None:
    """True where a key is not seen, of a descriptor or a mask; extents are (batch, queries, keys)."""
    batch, queries, keys = extents
    if isinstance(descriptor, SequenceDescriptor):
        segments = None
        if mask_type.is_padding() or layout.is_thd():
            segments = descriptor.segments(batch, queries, keys)
        return hidden_keys(mask_type, window, segments, queries, keys)
    if layout.is_thd():
        raise ValueError(
            f"qkv_layout={layout.name} without a SequenceDescriptor; make one with its from_ methods"
        )
    hidden = hidden_keys(mask_type, window, None, queries, keys)
    if descriptor is None or not mask_type.is_padding():
        return hidden
    if descriptor.ndim != 4:
        raise ValueError(f"the mask has shape {descriptor.shape}; it must be [b or 1, 1 or h, q, k]")
    given = descriptor.astype(bool)
    return given if hidden is None else given | hidden


def sink_of(softmax_type: AttnSoftmaxType, offset: Array | None, heads: int) -> Array | None:
    """float32 [1, h or 1, 1, 1] in the denominator: nothing, 0, or the learnt offsets."""
    if (offset is not None) is not (softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX):
        given = "None" if offset is None else f"an array of shape {offset.shape}"
        raise ValueError(
            f"softmax_type={softmax_type.name} and softmax_offset={given}; LEARNABLE_SOFTMAX takes one"
        )
    if softmax_type is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
        return jnp.zeros((1, 1, 1, 1), jnp.float32)
    if offset is not None and offset.shape != (1, heads, 1, 1):
        raise ValueError(f"softmax_offset has shape {offset.shape}; it must be (1, {heads}, 1, 1)")
    return None if offset is None else offset.astype(jnp.float32)


def dropout_of(key: Array, rate: float) -> Callable[[Array], Array]:
    """weights [b, h, q, k] -> those that a draw keeps, scaled up by what it drops."""

    def drop(weights: Array) -> Array:
        keep = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
        return weights * (keep.astype(weights.dtype) / jnp.asarray(1.0 - rate, weights.dtype))

    return drop


def _request(
    query: Array,
    key: Array,
    value: Array,
    layout: QKVLayout,
    bias: AttnBiasType,
    mask: AttnMaskType,
    softmax: AttnSoftmaxType,
) -> AttentionRequest:
    return AttentionRequest(
        query.dtype, layout, bias, mask, softmax, 0.0, query.shape[2], key.shape[2], query.shape[1], key.shape[1],
        query.shape[3], value.shape[3], None, True, "cpu",
    )  # fmt: skip

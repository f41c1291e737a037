"""Checks and conversions for attention arrays and options."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import described, drop_rate, member, number
from ..primitives.attention.enums import AttnBiasType, AttnSoftmaxType, QKVLayout
from ..runtime.checks import broadcasts, check_key, check_shaped, check_values


def separated(qkv: tuple[Array, ...], layout: QKVLayout) -> tuple[Array, Array, Array]:
    """Split a layout's arrays into query, key and value [b, s, heads, d]."""
    if not isinstance(qkv, (tuple, list)):
        raise TypeError(f"qkv={described(qkv)}; give a tuple of one, two or three arrays")
    expected = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
    if len(qkv) != expected:
        raise ValueError(f"qkv has {len(qkv)} arrays; qkv_layout={layout.name} has {expected}")
    axes = {1: (5,), 2: (4, 5), 3: (4, 4, 4)}[expected]
    for array, ndim in zip(qkv, axes, strict=True):
        check_values("an array of qkv", array)
        if array.ndim != ndim:
            raise ValueError(
                f"an array of {layout.name} has shape {array.shape}; it must have {ndim} axes"
            )
    packed = {1: 3, 2: 2}.get(expected)
    if packed is not None and qkv[-1].shape[2] != packed:
        raise ValueError(
            f"the packed array of {layout.name} has shape {qkv[-1].shape}; axis 2 must be {packed}"
        )
    if layout.is_qkvpacked():
        packed_qkv = qkv[0]
        return packed_qkv[:, :, 0], packed_qkv[:, :, 1], packed_qkv[:, :, 2]
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
    """Raise ValueError or TypeError unless arrays and options fit together."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_values(name, array)
    if (
        key.shape[:3] != value.shape[:3]
        or query.shape[0] != key.shape[0]
        or query.shape[3] != key.shape[3]
    ):
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
        description = described(bias)
        raise ValueError(
            f"attn_bias_type={bias_type.name} and bias={description}; give a bias with a type that adds one"
        )
    if bias is not None:
        check_values("bias", bias)
        full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        if not broadcasts(bias.shape, full):
            raise ValueError(
                f"bias has shape {bias.shape}; it must be {full}, or 1 in place of an extent"
            )


def sink_logit(softmax_type: AttnSoftmaxType, offset: Array | None, heads: int) -> Array | None:
    """Sink in the softmax denominator, float32 [1, h or 1, 1, 1]: None, 0, or the learnable offsets."""
    member("softmax_type", softmax_type, AttnSoftmaxType)
    if (offset is not None) is not (softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX):
        raise ValueError(
            f"softmax_type={softmax_type.name} and softmax_offset={described(offset)}; LEARNABLE_SOFTMAX takes one"
        )
    if softmax_type is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
        return jnp.zeros((1, 1, 1, 1), jnp.float32)
    if offset is None:
        return None
    check_shaped("softmax_offset", offset, (1, heads, 1, 1))
    return offset.astype(jnp.float32)


def dropout_function(key: Array, rate: float) -> Callable[[Array], Array]:
    """Build a function that drops weights [b, h, q, k] and scales the kept ones; TypeError unless key is a key."""
    check_key("seed", key)

    def drop(weights: Array) -> Array:
        keep = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
        return weights * (keep.astype(weights.dtype) / jnp.asarray(1.0 - rate, weights.dtype))

    return drop

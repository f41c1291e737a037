"""DotProductAttention: out = softmax(scale * q @ k.T + bias) @ v, with masks, windows, dropout and sinks."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...common.checks import described, drop_rate, whole
from ..attention import reference
from ..attention.descriptor import SequenceDescriptor
from ..attention.enums import AttnBiasType, AttnSoftmaxType, QKVLayout, canonicalize_attn_mask_type
from ..attention.fused import check_attention, dropout_of, hidden_of, separated, sink_of
from ..attention.masks import check_window
from ..sharding import HEAD_AXES
from .base import parameter


class _UnfusedDotProductAttention(nn.Module):
    """The attention in jnp operations; of learnable sinks it holds `softmax_offset` [1, h, 1, 1]."""

    attention_dropout: float
    dropout_rng_name: str
    float32_logits: bool
    scale: float
    bias_type: AttnBiasType
    softmax_type: AttnSoftmaxType

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        hidden: Array | None,
        deterministic: bool,
    ) -> Array:
        heads = query.shape[2]
        offset = None
        if self.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            axes = (None, HEAD_AXES, None, None)
            zeros = nn.initializers.zeros
            offset = parameter(self, "softmax_offset", zeros, axes, (1, heads, 1, 1), jnp.float32)
        dropped = None
        if self.attention_dropout > 0 and not deterministic:
            dropped = dropout_of(self.make_rng(self.dropout_rng_name), self.attention_dropout)
        sink = sink_of(self.softmax_type, offset, heads)
        return reference.attend(
            query, key, value, bias, self.bias_type, hidden, self.scale, sink, dropped, self.float32_logits
        )


class DotProductAttention(nn.Module):
    """out [b, q, h, d] in query's dtype; with transpose_batch_sequence [q, b, h, d].

    num_gqa_groups       heads of keys and values, which divide num_attention_heads; None: as many
    attn_bias_type       "no_bias", "pre_scale_bias", "post_scale_bias"; None: the last, where a bias is given
    float32_logits       scores in float32 before the softmax; else in the inputs' dtype
    qkv_layout           "bshd_bshd_bshd", "bshd_bs2hd", "bs3hd", or with "t" for rows of several sequences
    scale_factor         None: 1 / sqrt(head_dim)
    window_size          (left, right) tokens that a query sees, -1 for no limit
    softmax_type         "vanilla", "off_by_one" or "learnable"
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | AttnBiasType | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        sequence_descriptor: SequenceDescriptor | Array | None = None,
        bias: Array | None = None,
        *,
        deterministic: bool = False,
        mask: Array | None = None,
    ) -> Array:
        """query, key, value as qkv_layout has them; sequence_descriptor or a mask, True of which hides a key."""
        if mask is not None:
            if sequence_descriptor is not None:
                raise ValueError(
                    "mask and sequence_descriptor were both given; give the sequence_descriptor alone"
                )
            warnings.warn(
                "mask is deprecated; pass it as sequence_descriptor", DeprecationWarning, stacklevel=2
            )
            sequence_descriptor = mask
        layout, bias_type = self._layout(), self._bias_type(bias)
        mask_type = canonicalize_attn_mask_type(self.attn_mask_type)
        window = check_window(self.window_size)
        drop_rate("attention_dropout", self.attention_dropout)
        arrays = tuple(array for array in (query, key, value) if array is not None)
        if self._transposed():
            arrays = tuple(jnp.swapaxes(array, 0, 1) for array in arrays)
        query, key, value = separated(arrays, layout)
        self._check_heads(query, key)
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale_factor is None else self.scale_factor
        check_attention(query, key, value, bias, bias_type, self.attention_dropout, scale)
        extents = (query.shape[0], query.shape[1], key.shape[1])
        hidden = hidden_of(sequence_descriptor, mask_type, layout, window, extents)
        out = _UnfusedDotProductAttention(
            self.attention_dropout,
            self.dropout_rng_name,
            self.float32_logits,
            scale,
            bias_type,
            AttnSoftmaxType.from_str(self.softmax_type),
        )(query, key, value, bias, hidden, deterministic)
        out = checkpoint_name(out, self.context_checkpoint_name)
        return jnp.swapaxes(out, 0, 1) if self._transposed() else out

    def _layout(self) -> QKVLayout:
        try:
            return QKVLayout(self.qkv_layout.lower())
        except (ValueError, AttributeError):
            choices = ", ".join(layout.value for layout in QKVLayout)
            raise ValueError(f"qkv_layout={described(self.qkv_layout)}; choose one of {choices}") from None

    def _bias_type(self, bias: Array | None) -> AttnBiasType:
        kind = self.attn_bias_type
        if kind is None:
            return AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
        if isinstance(kind, AttnBiasType):
            return kind
        names = {member.name.lower(): member for member in AttnBiasType}
        if kind not in names:
            raise ValueError(f"attn_bias_type={described(kind)}; choose one of {', '.join(names)}, or None")
        return names[kind]

    def _transposed(self) -> bool:
        if self.transpose_batch_sequence is None:
            return False
        return self.transpose_batch_sequence

    def _check_heads(self, query: Array, key: Array) -> None:
        groups = self.num_attention_heads if self.num_gqa_groups is None else self.num_gqa_groups
        for name, extent in (("head_dim", self.head_dim), ("num_attention_heads", self.num_attention_heads)):
            whole(name, extent)
        whole("num_gqa_groups", groups)
        found = (query.shape[2], query.shape[3], key.shape[2])
        wanted = (self.num_attention_heads, self.head_dim, groups)
        if found != wanted:
            raise ValueError(
                f"query {query.shape} and key {key.shape} have heads, extents and groups {found}; the module was made "
                f"for {wanted}"
            )

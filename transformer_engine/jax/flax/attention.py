"""DotProductAttention: out = softmax(scale * q @ k.T + bias) @ v, with masks, windows, dropout and sinks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...common import env
from ...common.checks import described, drop_rate, member, suggests_keywords, switch, whole
from ..attention.arguments import check_attention, dropout_function, separated, sink_logit
from ..attention.availability import is_fused_attn_kernel_available
from ..attention.fused import fused_attn, hidden_keys_mask
from ..context_parallel.plan import make_plan
from ..context_parallel.reorder import CPStrategy
from ..primitives.attention import reference
from ..primitives.attention.descriptor import SequenceDescriptor
from ..primitives.attention.enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    canonicalize_attn_mask_type,
)
from ..primitives.attention.masks import Window, check_tokens, check_window
from ..primitives.attention.score_mod import check_functions
from ..runtime.checks import broadcasts, check_values
from ..sharding import HEAD_AXES
from ..softmax import SoftmaxFusionType, check_scores, scaled_softmax
from .base import check_call, parameter


class Softmax(nn.Module):
    """Softmax over the keys of attention scores."""

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        softmax_offset: Array | None = None,
    ) -> Array:
        """Compute softmax(scale_factor * (inputs + bias)) [b, h, q, k] in the dtype of inputs.

        Hidden keys have a probability of exactly zero.

        Args:
            inputs: Scores [b, h, q, k].
            mask: Mask in which True hides a key.
            bias: Bias that broadcasts to the shape of inputs.
            softmax_offset: Offset [1, h, 1, 1] for LEARNABLE_SOFTMAX.
        """
        check_call(self, inputs=inputs)
        member("softmax_type", self.softmax_type, AttnSoftmaxType)
        member("softmax_fusion_type", self.softmax_fusion_type, SoftmaxFusionType)
        check_scores(inputs, self.scale_factor)
        if bias is not None:
            check_values("bias", bias)
            if not broadcasts(bias.shape, inputs.shape):
                raise ValueError(
                    f"bias has shape {bias.shape}; it must be {inputs.shape}, or 1 in place of an extent"
                )
        sink = sink_logit(self.softmax_type, softmax_offset, inputs.shape[1])
        scores = inputs if bias is None else inputs.astype(jnp.float32) + bias.astype(jnp.float32)
        masked = self.softmax_fusion_type is SoftmaxFusionType.SCALED_MASKED
        # A masked softmax without a mask is a plain one, as layers whose mask is optional rely on.
        kind = SoftmaxFusionType.SCALED if masked and mask is None else self.softmax_fusion_type
        return scaled_softmax(scores, mask, self.scale_factor, kind, sink).astype(inputs.dtype)


def softmax_offset(module: nn.Module, softmax_type: AttnSoftmaxType, heads: int) -> Array | None:
    """The module's learnable sink parameter, float32 [1, h, 1, 1]; None for other softmaxes."""
    if softmax_type is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
        return None
    axes = (None, HEAD_AXES, None, None)
    return parameter(
        module, "softmax_offset", nn.initializers.zeros, axes, (1, heads, 1, 1), jnp.float32
    )


class _UnfusedDotProductAttention(nn.Module):
    """Attention in jnp operations; holds `softmax_offset` [1, h, 1, 1] if sinks are learnable."""

    attention_dropout: float
    float32_logits: bool
    scale: float
    bias_type: AttnBiasType
    softmax_type: AttnSoftmaxType
    return_max_logit: bool

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None,
        hidden: Array | None,
        seed: Array | None,
    ) -> Any:
        """Attend; `seed` is the key of the dropout mask, None for no dropout."""
        heads = query.shape[2]
        offset = softmax_offset(self, self.softmax_type, heads)
        dropped = None if seed is None else dropout_function(seed, self.attention_dropout)
        sink = sink_logit(self.softmax_type, offset, heads)
        return reference.attend(
            query,
            key,
            value,
            bias,
            self.bias_type,
            hidden,
            self.scale,
            sink,
            dropped,
            self.float32_logits,
            max_logit=self.return_max_logit,
        )


class _FusedDotProductAttention(nn.Module):
    """`fused_attn`; holds `softmax_offset` [1, h, 1, 1] if sinks are learnable."""

    attention_dropout: float
    scale: float
    layout: QKVLayout
    bias_type: AttnBiasType
    mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    window: Window | None
    max_segments_per_seq: int
    balanced: bool
    axis: str
    strategy: CPStrategy
    context_checkpoint_name: str
    score_mod: Callable[..., Array] | None
    score_mod_bprop: Callable[..., Array] | None
    return_max_logit: bool

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        descriptor: SequenceDescriptor | Array | None,
        bias: Array | None,
        seed: Array | None,
        deterministic: bool,
        score_mod_tensors: Any,
        score_mod_bprop_tensors: Any,
    ) -> Any:
        rate = 0.0 if seed is None else self.attention_dropout
        return fused_attn(
            (query, key, value),
            bias,
            descriptor,
            seed,
            self.bias_type,
            self.mask_type,
            self.layout,
            self.softmax_type,
            self.scale,
            rate,
            not deterministic,
            self.max_segments_per_seq,
            self.window,
            self.strategy,
            self.balanced,
            self.axis,
            self.context_checkpoint_name,
            softmax_offset(self, self.softmax_type, query.shape[2]),
            score_mod=self.score_mod,
            score_mod_bprop=self.score_mod_bprop,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
            return_max_logit=self.return_max_logit,
        )


@suggests_keywords
class DotProductAttention(nn.Module):
    """Attention: out [b, q, h, d], or [q, b, h, d] with transpose_batch_sequence, in the dtype of the query.

    Args:
        head_dim: Head size d.
        num_attention_heads: Query heads.
        num_gqa_groups: Key and value heads, by default num_attention_heads.
        attention_dropout: Dropout rate for the probabilities.
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal" or a bottom-right form.
        attn_bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias", by default the last if a bias is given.
        dtype: Parameter dtype.
        dropout_rng_name: Flax's random-stream name.
        float32_logits: Compute scores in float32 before the softmax.
        qkv_layout: "bshd_bshd_bshd", "bshd_bs2hd", "bs3hd", or with "t" for rows that hold several sequences.
        scale_factor: Factor of the scores, by default 1 / sqrt(head_dim).
        transpose_batch_sequence: The sequence axis precedes the batch axis.
        window_size: (left, right) tokens that a query sees; -1 is unlimited.
        max_segments_per_seq: Most sequences in a packed row.
        context_parallel_causal_load_balanced: Tokens are in `reorder_causal_load_balancing` order.
        context_parallel_axis: Mesh axis over which tokens are sharded.
        context_parallel_strategy: "DEFAULT", "ALL_GATHER" or "RING".
        context_checkpoint_name: Name of the output for recomputation policies.
        softmax_type: "vanilla", "off_by_one" or "learnable".
        score_mod: Function applied to the scores before the softmax, see `attention.fused_attn`.
        score_mod_bprop: Its derivative, see `attention.fused_attn`.
        return_max_logit: Return a pair: attention output and largest logits [h], see `attention.fused_attn`.
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
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str | CPStrategy = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Array] | None = None
    score_mod_bprop: Callable[..., Array] | None = None
    return_max_logit: bool = False

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
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> Any:
        """Compute attention from query to key and value, with the shapes in qkv_layout.

        Args:
            query: Queries, or queries, keys and values in one packed array.
            key: Keys, or keys and values packed; None if query holds them.
            value: Values; None if another array holds them.
            sequence_descriptor: Descriptor for the sequences, or a mask in which True hides a key.
            bias: Score bias [1 or b, heads, q, k].
            deterministic: Whether to disable dropout.
            mask: Alias for sequence_descriptor.
            score_mod_tensors: Arrays for score_mod.
            score_mod_bprop_tensors: Arrays for score_mod_bprop.
        """
        if mask is not None:
            if sequence_descriptor is not None:
                raise ValueError(
                    "mask and sequence_descriptor were both given; give the sequence_descriptor only"
                )
            warnings.warn(
                "mask is deprecated; pass it as sequence_descriptor",
                DeprecationWarning,
                stacklevel=2,
            )
            sequence_descriptor = mask
        arrays = {"query": query, "key": key, "value": value}
        check_call(self, **{name: array for name, array in arrays.items() if array is not None})
        switch("deterministic", deterministic)
        layout, bias_type = self._layout(), self._bias_type(bias)
        mask_type = canonicalize_attn_mask_type(self.attn_mask_type)
        window = check_window(self.window_size)
        drop_rate("attention_dropout", self.attention_dropout)
        check_functions(
            self.score_mod, self.score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors
        )
        operands = tuple(array for array in arrays.values() if array is not None)
        if self._transposed():
            operands = tuple(jnp.swapaxes(array, 0, 1) for array in operands)
        query, key, value = separated(operands, layout)
        self._check_heads(query, key)
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale_factor is None else self.scale_factor
        check_attention(query, key, value, bias, bias_type, self.attention_dropout, scale)
        softmax_type, strategy = AttnSoftmaxType.from_str(self.softmax_type), self._strategy()
        extents = (query.shape[0], query.shape[1], key.shape[1])
        sequence_descriptor = check_tokens(
            sequence_descriptor,
            mask_type,
            window,
            layout.is_thd(),
            self.max_segments_per_seq,
            (query.shape[0], query.shape[2], *extents[1:]),
        )
        seed = None
        if self.attention_dropout > 0 and not deterministic:
            # Drawn from this module's stream, so that both implementations and a plain Flax layer with the same
            # structure use the same key.
            seed = self.make_rng(self.dropout_rng_name)
        if self._uses_fused_attention(
            query, key, value, layout, bias_type, mask_type, softmax_type, window, deterministic
        ):
            out = _FusedDotProductAttention(
                self.attention_dropout,
                scale,
                layout.to_separate(),
                bias_type,
                mask_type,
                softmax_type,
                window,
                self.max_segments_per_seq,
                self.context_parallel_causal_load_balanced,
                self.context_parallel_axis,
                strategy,
                self.context_checkpoint_name,
                self.score_mod,
                self.score_mod_bprop,
                self.return_max_logit,
            )(
                query,
                key,
                value,
                sequence_descriptor,
                bias,
                seed,
                deterministic,
                score_mod_tensors,
                score_mod_bprop_tensors,
            )
            return self._result(out)
        hidden = hidden_keys_mask(sequence_descriptor, mask_type, layout, window, extents)
        out = _UnfusedDotProductAttention(
            self.attention_dropout,
            self.float32_logits,
            scale,
            bias_type,
            softmax_type,
            self.return_max_logit,
        )(query, key, value, bias, hidden, seed)
        return self._result(out, self.context_checkpoint_name)

    def _result(self, output: Any, name: str | None = None) -> Any:
        """Convert the output to the module's layout, with `name` for recomputation, and the largest logits if any."""
        out, *largest = output if self.return_max_logit else (output,)
        out = out if name is None else checkpoint_name(out, name)
        out = jnp.swapaxes(out, 0, 1) if self._transposed() else out
        return (out, *largest) if largest else out

    def _uses_fused_attention(
        self,
        query: Array,
        key: Array,
        value: Array,
        layout: QKVLayout,
        bias_type: AttnBiasType,
        mask_type: AttnMaskType,
        softmax_type: AttnSoftmaxType,
        window: Window | None,
        deterministic: bool,
    ) -> bool:
        """Whether to use fused_attn: for several devices, a score_mod, and kernels unless NVTE_FUSED_ATTN=0."""
        balanced = self.context_parallel_causal_load_balanced
        tokens = (query.shape[1], key.shape[1])
        plan = make_plan(
            self.context_parallel_axis, self._strategy(), balanced, layout, None, tokens
        )
        if self.score_mod is not None or plan is not None:
            return True
        return env.flag("NVTE_FUSED_ATTN") and is_fused_attn_kernel_available(
            not deterministic,
            query.dtype,
            key.dtype,
            layout.to_separate(),
            bias_type,
            mask_type,
            softmax_type,
            0.0 if deterministic else self.attention_dropout,
            query.shape[2],
            key.shape[2],
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            window,
            return_max_logit=self.return_max_logit,
        )

    def _strategy(self) -> CPStrategy:
        strategy = self.context_parallel_strategy
        if isinstance(strategy, CPStrategy):
            return strategy
        if not isinstance(strategy, str) or strategy.upper() not in CPStrategy.__members__:
            raise ValueError(
                f"context_parallel_strategy={described(strategy)}; choose one of {', '.join(CPStrategy.__members__)}"
            )
        return CPStrategy[strategy.upper()]

    def _layout(self) -> QKVLayout:
        try:
            return QKVLayout(self.qkv_layout.lower())
        except (ValueError, AttributeError):
            choices = ", ".join(layout.value for layout in QKVLayout)
            raise ValueError(
                f"qkv_layout={described(self.qkv_layout)}; choose one of {choices}"
            ) from None

    def _bias_type(self, bias: Array | None) -> AttnBiasType:
        kind = self.attn_bias_type
        if kind is None:
            return AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
        if isinstance(kind, AttnBiasType):
            return kind
        names = {member.name.lower(): member for member in AttnBiasType}
        if not isinstance(kind, str) or kind.lower() not in names:
            raise ValueError(
                f"attn_bias_type={described(kind)}; choose one of {', '.join(names)}, or None"
            )
        return names[kind.lower()]

    def _transposed(self) -> bool:
        switch("transpose_batch_sequence", self.transpose_batch_sequence)
        return bool(self.transpose_batch_sequence)

    def _check_heads(self, query: Array, key: Array) -> None:
        groups = self.num_attention_heads if self.num_gqa_groups is None else self.num_gqa_groups
        for name, extent in (
            ("head_dim", self.head_dim),
            ("num_attention_heads", self.num_attention_heads),
        ):
            whole(name, extent)
        whole("num_gqa_groups", groups)
        heads, expected = (query.shape[2], key.shape[2]), (self.num_attention_heads, groups)
        if heads != expected:
            raise ValueError(
                f"query {query.shape} and key {key.shape} have {heads[0]} and {heads[1]} heads; the module was made "
                f"for num_attention_heads={expected[0]} and num_gqa_groups={expected[1]}"
            )

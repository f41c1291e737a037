"""TransformerLayer, an encoder or decoder layer, and the modules it contains."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import drop_rate, function_or_none, member, suggests_keywords, switch, whole
from ...common.warning import warn_once
from ..activation import ActivationParams
from ..runtime.checks import check_rate
from ..runtime.residual import bypass
from ..sharding import (
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    SEQLEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    token_axes,
)
from .attention import DotProductAttention
from .base import Initializer, check_call, kernel_initializer
from .dense_general import check_shared_axes
from .layernorm_mlp import LayerNormMLP, check_activations
from .low_rank import LoRAScope, _canonicalize_lora_scope
from .multi_head_attention import MultiHeadAttention
from .norm import LayerNorm
from .positions import RelativePositionBiases, rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "LoRAScope",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerLayer",
    "TransformerLayerType",
    "_canonicalize_lora_scope",
    "rotary_pos_emb",
]


class TransformerLayerType(enum.Enum):
    """ENCODER: self-attention and an MLP; DECODER: attention to an encoder's output between them."""

    ENCODER = "encoder"
    DECODER = "decoder"


@suggests_keywords
class TransformerLayer(nn.Module):
    """Transformer layer: y [b, s, h] in the dtype of the inputs; with transpose_batch_sequence [s, b, h].

    The submodules are `attention` (`self_attention` and `encoder_decoder_attention` in a decoder), `mlp`,
    `relpos_bias` and `output_layernorm`.

    Args:
        hidden_size: Number h of features.
        mlp_hidden_size: Hidden features in the feed-forward block.
        hidden_dropout: Dropout rate for both blocks' outputs.
        hidden_dropout_dims: Axes along which that mask is broadcast.
        intermediate_dropout: Dropout rate for the hidden features.
        intermediate_dropout_dims: Axes along which that mask is broadcast.
        mha_kernel_init: Initializer for attention kernels.
        mlp_kernel_init: Initializer for the feed-forward block's kernels.
        mlp_activations: Feed-forward activations.
        mlp_activation_params: Parameters for clamped activations.
        self_attn_mask_type: Self-attention mask type.
        self_attn_bias_type: Self-attention bias type.
        apply_residual_connection_post_layernorm: Add a block's normalized input instead of its input.
        output_layernorm: Normalize the layer's output instead of the attention input.
        float32_attention_logits: Compute scores in float32 before the softmax.
        layer_type: TransformerLayerType.ENCODER or DECODER.
        enable_relative_embedding: Add T5's relative biases.
        relative_embedding: Module for the relative biases, by default a new `RelativePositionBiases`.
        enable_rotary_pos_emb: Rotate queries and keys in self-attention, and in a decoder's cross-attention.
        drop_path: Rate at which a batch row skips self-attention or the feed-forward block.
        enable_sequence_parallel: Shard norm inputs over tokens along the tensor-parallel axis.

    The other arguments are as in `MultiHeadAttention`.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str | Callable[[Array], Array]] = ("gelu",)
    mlp_activation_params: ActivationParams | Mapping[str, float] | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Array] | None = None
    score_mod_bprop: Callable[..., Array] | None = None

    def __post_init__(self) -> None:
        self.mha_kernel_init = kernel_initializer(self.mha_kernel_init, self.dtype, "normal")
        self.mlp_kernel_init = kernel_initializer(self.mlp_kernel_init, self.dtype)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        encoded: Array | None = None,
        attention_mask: Array | None = None,
        encoder_decoder_mask: Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> Array:
        """Compute the output for inputs [b, s, h] and, in a decoder, encoded [b, k, h]; True in a mask hides a key.

        The output has the inputs' width; a head has the width hidden_size // num_attention_heads.

        Args:
            inputs: Inputs [b, s, h].
            encoded: Encoder output [b, k, h], for a decoder.
            attention_mask: Self-attention mask.
            encoder_decoder_mask: Mask for the attention to `encoded`.
            deterministic: Disable dropout.
            decode: Self-attention stores keys and values in the collection "cache", see `MultiHeadAttention`.
            max_decode_length: Number of tokens in the cache; relative biases depend on it.
            score_mod_tensors: Tensors for `score_mod`.
            score_mod_bprop_tensors: Tensors for `score_mod_bprop`.
        """
        switch("deterministic", deterministic)
        switch("decode", decode)
        self._check(inputs, encoded)
        decoder = self.layer_type is TransformerLayerType.DECODER
        bias = self._relative_bias(inputs, max_decode_length if decode else None, decode)
        with bypass(inputs, not self.apply_residual_connection_post_layernorm) as residual:
            x, normalized = self._attention(
                "self_attention" if decoder else "attention",
                self.self_attn_mask_type,
                self.self_attn_bias_type,
                input_layernorm=not self.output_layernorm,
                score_mod=self.score_mod,
                score_mod_bprop=self.score_mod_bprop,
            )(
                inputs,
                inputs,
                attention_mask,
                bias,
                decode=decode,
                deterministic=deterministic,
                score_mod_tensors=score_mod_tensors,
                score_mod_bprop_tensors=score_mod_bprop_tensors,
            )
        x = self._join_residual(x, residual.value, normalized, deterministic, self.drop_path)
        if decoder and encoded is not None:
            with bypass(x, not self.apply_residual_connection_post_layernorm) as residual:
                y, normalized = self._attention("encoder_decoder_attention", "padding", "no_bias")(
                    x, encoded, encoder_decoder_mask, deterministic=deterministic
                )
            x = self._join_residual(y, residual.value, normalized, deterministic, drop_path=0.0)
        with bypass(x, not self.apply_residual_connection_post_layernorm) as residual:
            y, normalized = self._mlp()(x, deterministic=deterministic)
        x = self._join_residual(y, residual.value, normalized, deterministic, self.drop_path)
        if not self.output_layernorm:
            return x
        return LayerNorm(
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(W_NO_SHARD_AXES,),
            bias_axes=(W_NO_SHARD_AXES,),
            dtype=self.dtype,
            name="output_layernorm",
        )(x)

    def _check(self, inputs: Array, encoded: Array | None) -> None:
        for name in ("hidden_size", "mlp_hidden_size", "num_attention_heads"):
            whole(name, getattr(self, name))
        for name in ("hidden_dropout", "intermediate_dropout", "drop_path"):
            check_rate(name, getattr(self, name))
        drop_rate("attention_dropout", self.attention_dropout)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}; "
                "give a divisor of it"
            )
        check_call(self, inputs=inputs)
        if inputs.ndim != 3:
            raise ValueError(f"inputs have shape {inputs.shape}; the layer takes [b, s, h]")
        for name in ("hidden_dropout_dims", "intermediate_dropout_dims"):
            check_shared_axes(name, getattr(self, name), inputs.ndim)
        check_activations("mlp_activations", self.mlp_activations)
        function_or_none("relative_embedding", self.relative_embedding)
        member("layer_type", self.layer_type, TransformerLayerType)
        decoder = self.layer_type is TransformerLayerType.DECODER
        if decoder and encoded is None:
            raise ValueError("layer_type=DECODER and encoded=None; give the encoder's output")
        if encoded is not None and not decoder:
            warn_once(
                "TransformerLayer: encoded",
                "encoded was given to a TransformerLayer of layer_type=ENCODER, which does not read it; use DECODER",
                stacklevel=4,
            )

    def _relative_bias(self, inputs: Array, length: int | None, decode: bool) -> Array | None:
        if not self.enable_relative_embedding:
            return None
        if decode and length is None:
            raise ValueError(
                "decode=True and enable_relative_embedding=True without max_decode_length; give the tokens that the "
                "cache is made for"
            )
        bias = self.relative_embedding
        if bias is None:
            bias = RelativePositionBiases(
                num_buckets=32,
                max_distance=128,
                num_attention_heads=self.num_attention_heads,
                dtype=self.dtype,
                name="relpos_bias",
            )
        tokens = (
            inputs.shape[0 if self.transpose_batch_sequence else 1] if length is None else length
        )
        return bias(tokens, tokens, self.layer_type is TransformerLayerType.ENCODER)

    def _attention(
        self, name: str, mask_type: str, bias_type: str | None, **options: Any
    ) -> MultiHeadAttention:
        return MultiHeadAttention(
            head_dim=self.hidden_size // self.num_attention_heads,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            layernorm_type=self.layernorm_type,
            layernorm_epsilon=self.layernorm_epsilon,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            attn_mask_type=mask_type,
            attn_bias_type=bias_type,
            low_rank_adaptation_scope=self.low_rank_adaptation_scope,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            fuse_qkv_params=self.fuse_qkv_params,
            transpose_batch_sequence=self.transpose_batch_sequence,
            enable_sequence_parallel=self.enable_sequence_parallel,
            scale_attn_logits=self.scale_attn_logits,
            scaled_query_init=self.scaled_query_init,
            float32_logits=self.float32_attention_logits,
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            name=name,
            **options,
        )

    def _mlp(self) -> LayerNormMLP:
        return LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(W_NO_SHARD_AXES,),
            ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=self.mlp_kernel_init,
            kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
            kernel_axes_2=(W_TP_AXES, W_FSDP_AXES),
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes_1=(W_JOINED_AXES, W_TP_AXES),
            bias_axes_2=(W_NO_SHARD_AXES,),
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            activations=self.mlp_activations,
            activation_params=self.mlp_activation_params,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            enable_low_rank_adaptation=_canonicalize_lora_scope(self.low_rank_adaptation_scope).mlp,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            layernorm_input_axes=self._token_axes(SEQLEN_TP_AXES, HIDDEN_AXES),
            dot_1_input_axes=self._token_axes(SEQLEN_AXES, HIDDEN_AXES),
            dot_2_input_axes=self._token_axes(SEQLEN_AXES, HIDDEN_TP_AXES),
            transpose_batch_sequence=self.transpose_batch_sequence,
            name="mlp",
        )

    def _token_axes(self, sequence: str, hidden: str) -> tuple[str, str, str] | None:
        """Axis names under sequence parallelism; otherwise None, and XLA chooses."""
        if not self.enable_sequence_parallel:
            return None
        return token_axes(self.transpose_batch_sequence, sequence, hidden)

    def _join_residual(
        self,
        x: Array,
        residual: Array,
        normalized: Array | None,
        deterministic: bool,
        drop_path: float,
    ) -> Array:
        """Apply dropout and drop path to a block's output and add its residual connection."""
        if self.apply_residual_connection_post_layernorm:
            assert normalized is not None
            residual = normalized
        x = nn.Dropout(
            rate=self.hidden_dropout,
            broadcast_dims=self.hidden_dropout_dims,
            rng_collection=self.dropout_rng_name,
        )(x, deterministic=deterministic)
        if drop_path > 0.0:
            batch = 1 if self.transpose_batch_sequence else 0
            broadcast_axes = tuple(axis for axis in range(x.ndim) if axis != batch)
            x = nn.Dropout(
                rate=drop_path, broadcast_dims=broadcast_axes, rng_collection=self.dropout_rng_name
            )(x, deterministic=deterministic)
        return x + residual

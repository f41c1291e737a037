"""MultiHeadAttention: query, key and value projections, attention, and the output projection."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ...common.checks import suggests_keywords, switch, whole
from ..primitives.attention.enums import canonicalize_attn_mask_type
from ..primitives.attention.masks import check_window, reads_mask
from ..quantize.config import get_global_quantize_recipe
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
from .dense_general import DenseGeneral
from .kv_cache import KeyValueCache
from .layernorm_dense_general import LayerNormDenseGeneral
from .low_rank import _canonicalize_lora_scope
from .positions import rotate_joint_projection, rotate_tokens

_FORMER_NAMES = {
    "num_heads": "num_attention_heads",
    "dropout_rate": "attention_dropout",
    "output_layernorm": "input_layernorm",
    "apply_residual_connection_post_layernorm": "return_layernorm_output",
    "fuse_qkv": "fuse_qkv_params",
}


@suggests_keywords
class MultiHeadAttention(nn.Module):
    """Multi-head attention with query, key, value and output projections, and an optional input norm.

    The parameters are `out` and, for self-attention without grouped heads, `qkv` (kernel [h, 3, heads * d]); otherwise
    `query` and `kv` (kernel [h, 2, groups * d]), or `query`, `key` and `value` without fuse_qkv_params.

    Args:
        input_layernorm: Normalize inputs_q before the projections.
        layernorm_epsilon: Added to the variance or the mean square.
        return_layernorm_output: Return the normalized inputs_q, otherwise None.
        kernel_init: Kernel initializer.
        use_bias: Add biases to the projections.
        enable_rotary_pos_emb: Rotate queries and keys by their positions.
        rotary_pos_emb_windows: (least, greatest) rotation wavelength.
        rotary_pos_emb_group_method: "consecutive" or "alternate" feature pairs.
        low_rank_adaptation_scope: Projections with low-rank adaptation: "none", "all", "qkv_proj", "output_proj" or
            "mlp"; "exclude_qkv_proj", "exclude_output_proj" or "exclude_mlp" for the others.
        fuse_qkv_params: One parameter holds the kernels of several projections.
        transpose_batch_sequence: The sequence axis precedes the batch axis in all arrays.
        enable_sequence_parallel: Shard norm inputs over tokens along the tensor-parallel axis.
        scale_attn_logits: Divide the scores by sqrt(head_dim).
        scaled_query_init: Divide the initial kernel of queries by sqrt(head_dim) instead.
        num_heads: Deprecated name for num_attention_heads.
        dropout_rate: Deprecated name for attention_dropout.
        output_layernorm: Deprecated name for input_layernorm.
        apply_residual_connection_post_layernorm: Deprecated name for return_layernorm_output.
        fuse_qkv: Deprecated name for fuse_qkv_params.

    The other arguments are as in `DotProductAttention` and `LayerNormDenseGeneral`.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool | None = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Array] | None = None
    score_mod_bprop: Callable[..., Array] | None = None
    num_heads: int | None = None
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None

    def __post_init__(self) -> None:
        for former, name in _FORMER_NAMES.items():
            if (value := getattr(self, former)) is not None:
                warnings.warn(
                    f"{former} of MultiHeadAttention is deprecated; give {name}",
                    DeprecationWarning,
                    stacklevel=3,
                )
                setattr(self, name, value)
                # Flax copies a module by its fields, which would warn again
                setattr(self, former, None)
        self.kernel_init = kernel_initializer(self.kernel_init, self.dtype, "normal")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_kv: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> tuple[Array, Array | None]:
        """Compute attention from inputs_q to inputs_kv.

        Args:
            inputs_q: Query inputs [b, q, h]; [q, b, h] with transpose_batch_sequence.
            inputs_kv: Key and value inputs [b, k, h]; the same array as inputs_q for self-attention.
            mask: Mask that broadcasts to [b, heads, q, k], True where a key is hidden.
            bias: Score bias [1 or b, heads, q, k].
            decode: Whether to read and extend the keys and values in the collection "cache". `init` allocates the cache
                for its input tokens; each later call processes one token.
            deterministic: Whether to disable dropout.
            score_mod_tensors: Arrays for score_mod.
            score_mod_bprop_tensors: Arrays for score_mod_bprop.

        Returns:
            A tuple: the output, with inputs_q's shape and dtype, and the normalized inputs_q, or None unless
            return_layernorm_output.

        Raises:
            ValueError: num_gqa_groups does not divide num_attention_heads, or shapes do not match.
        """
        check_call(self, inputs_q=inputs_q, inputs_kv=inputs_kv)
        switch("deterministic", deterministic)
        switch("decode", decode)
        for name in ("head_dim", "num_attention_heads"):
            whole(name, getattr(self, name))
        groups = self._groups
        whole("num_gqa_groups", groups)
        if self.num_attention_heads % groups:
            raise ValueError(
                f"num_gqa_groups={groups} does not divide num_attention_heads={self.num_attention_heads}; "
                "give a divisor of it"
            )
        transposed = bool(self.transpose_batch_sequence)
        projections, normalized = self._project(inputs_q, inputs_kv)
        query, key, value, cache = self._split_heads(projections, decode)
        mask_type, window = self.attn_mask_type, self.window_size
        if cache is not None and cache.filled:
            # A decoding step's hidden keys, and its row from a bias [1, h, length, length].
            window = check_window(self.window_size)
            hidden = cache.hidden(window)
            if mask is not None and reads_mask(
                canonicalize_attn_mask_type(self.attn_mask_type), window
            ):
                hidden = hidden | mask.astype(bool)
            if bias is not None and bias.shape[2] != 1:
                bias = lax.dynamic_slice_in_dim(bias, cache.position, 1, axis=2)
            mask, bias = hidden, bias
            key, value = cache.extended(key, value)
            mask_type, window = "padding", None
        attended = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=groups,
            attention_dropout=self.attention_dropout,
            attn_mask_type=mask_type,
            attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            float32_logits=self.float32_logits,
            scale_factor=1.0 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=transposed,
            window_size=window,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            score_mod_bprop=self.score_mod_bprop,
        )(
            query,
            key,
            value,
            mask,
            bias,
            deterministic=deterministic,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
        )
        attended = attended.reshape(*attended.shape[:2], self.num_attention_heads * self.head_dim)
        adapted = _canonicalize_lora_scope(self.low_rank_adaptation_scope).output_proj
        out = self._dense(
            "out",
            inputs_q.shape[-1],
            self.kernel_init,
            (W_TP_AXES, W_FSDP_AXES),
            (W_NO_SHARD_AXES,),
            adapted,
        )(attended)
        out = checkpoint_name(out, "out_proj")
        return out, normalized if self.return_layernorm_output else None

    def _split_heads(
        self, projections: Array | tuple[Array, Array, Array], decode: bool
    ) -> tuple[Array, Array, Array, KeyValueCache | None]:
        """Split rotated query, key and value into heads; also return a decoding module's cache."""
        transposed = bool(self.transpose_batch_sequence)
        if isinstance(projections, Array) and self.enable_rotary_pos_emb and not decode:
            return *rotate_joint_projection(
                projections,
                self.num_attention_heads,
                self.rotary_pos_emb_windows,
                transposed,
                self.rotary_pos_emb_group_method,
            ), None
        if isinstance(projections, Array):
            projections = projections[..., 0, :], projections[..., 1, :], projections[..., 2, :]
        query, key, value = projections
        query = query.reshape(*query.shape[:2], self.num_attention_heads, self.head_dim)
        key, value = (x.reshape(*x.shape[:2], self._groups, self.head_dim) for x in (key, value))
        cache = KeyValueCache.of(self, key, value, 0 if transposed else 1) if decode else None
        if self.enable_rotary_pos_emb:
            query, key = (self._rotate(x, cache) for x in (query, key))
        return query, key, value, cache

    def _rotate(self, x: Array, cache: KeyValueCache | None) -> Array:
        """Apply the rotary embedding to queries or keys, from the cache position on."""
        transposed = bool(self.transpose_batch_sequence)
        position, length = 0, x.shape[0 if transposed else 1]
        if cache is not None and cache.filled:
            position, length = cache.position, cache.length
        method = self.rotary_pos_emb_group_method
        return rotate_tokens(x, self.rotary_pos_emb_windows, transposed, method, position, length)

    @property
    def _groups(self) -> int:
        return self.num_attention_heads if self.num_gqa_groups is None else self.num_gqa_groups

    def _project(
        self, inputs_q: Array, inputs_kv: Array
    ) -> tuple[Array | tuple[Array, Array, Array], Array | None]:
        """Project the inputs to queries, keys and values.

        Returns:
            A tuple: the projections and the norm of inputs_q. The projections are one array [..., 3, heads * d], or
            query [..., heads * d], key and value [..., groups * d]. The norm is None if no later step reads it.
        """
        self_attention = inputs_q is inputs_kv
        width, kv_width = self.num_attention_heads * self.head_dim, self._groups * self.head_dim
        if self.fuse_qkv_params and self_attention and width == kv_width:
            joint, normalized = self._norm_dense(
                "qkv",
                (3, width),
                self._qkv_init,
                (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
                (W_JOINED_AXES, W_TP_AXES),
                self.return_layernorm_output,
            )(inputs_q)
            return checkpoint_name(joint, "combined_qkv_proj"), normalized
        query, normalized = self._norm_dense(
            "query",
            width,
            self._query_init,
            (W_FSDP_AXES, W_TP_AXES),
            (W_TP_AXES,),
            self.return_layernorm_output or self_attention,
        )(inputs_q)
        query = checkpoint_name(query, "query_proj")
        source = (
            _isolate_product(normalized) if self_attention and normalized is not None else inputs_kv
        )
        adapted = _canonicalize_lora_scope(self.low_rank_adaptation_scope).qkv_proj
        if self.fuse_qkv_params:
            both = self._dense(
                "kv",
                (2, kv_width),
                self._kv_init,
                (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
                (W_JOINED_AXES, W_TP_AXES),
                adapted,
            )(source)
            both = checkpoint_name(both, "combined_kv_proj")
            return (query, both[..., 0, :], both[..., 1, :]), normalized
        key, value = (
            self._dense(
                name, kv_width, self.kernel_init, (W_FSDP_AXES, W_TP_AXES), (W_TP_AXES,), adapted
            )(x)
            for name, x in (
                ("key", source),
                ("value", _isolate_product(source) if self_attention else source),
            )
        )
        return (
            query,
            checkpoint_name(key, "key_proj"),
            checkpoint_name(value, "value_proj"),
        ), normalized

    def _dense(
        self, name: str, features: Any, init: Any, kernel_axes: Any, bias_axes: Any, adapted: bool
    ) -> DenseGeneral:
        return DenseGeneral(
            features=features,
            kernel_init=init,
            kernel_axes=kernel_axes,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes=bias_axes,
            enable_low_rank_adaptation=adapted,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            input_axes=self._input_axes(HIDDEN_TP_AXES if name == "out" else HIDDEN_AXES),
            transpose_batch_sequence=bool(self.transpose_batch_sequence),
            name=name,
        )

    def _input_axes(self, hidden: str) -> tuple[str, ...]:
        """Axis names for a product's input; empty without sequence parallelism, where XLA decides."""
        if not self.enable_sequence_parallel:
            return ()
        return token_axes(bool(self.transpose_batch_sequence), SEQLEN_AXES, hidden)

    def _norm_dense(
        self, name: str, features: Any, init: Any, kernel_axes: Any, bias_axes: Any, returned: bool
    ) -> LayerNormDenseGeneral:
        return LayerNormDenseGeneral(
            features=features,
            enable_layernorm=self.input_layernorm,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(W_NO_SHARD_AXES,),
            ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=init,
            kernel_axes=kernel_axes,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes=bias_axes,
            return_layernorm_output=returned,
            enable_low_rank_adaptation=_canonicalize_lora_scope(
                self.low_rank_adaptation_scope
            ).qkv_proj,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            layernorm_input_axes=token_axes(
                bool(self.transpose_batch_sequence), SEQLEN_TP_AXES, HIDDEN_AXES
            )
            if self.enable_sequence_parallel
            else None,
            dot_input_axes=self._input_axes(HIDDEN_AXES) or None,
            transpose_batch_sequence=bool(self.transpose_batch_sequence),
            name=name,
        )

    def _query_init(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        assert self.kernel_init is not None, "__post_init__ sets it"
        drawn = self.kernel_init(key, shape, dtype)
        return drawn / math.sqrt(self.head_dim) if self.scaled_query_init else drawn

    def _kv_init(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Initialize a key and value kernel [h, 2, features], each part from a separate random key."""
        assert self.kernel_init is not None, "__post_init__ sets it"
        kernel_shape = (shape[0], shape[-1])
        return jnp.stack(
            [self.kernel_init(k, kernel_shape, dtype) for k in jax.random.split(key)], axis=-2
        )

    def _qkv_init(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Initialize a query, key and value kernel [h, 3, features], each part from a separate random key."""
        assert self.kernel_init is not None, "__post_init__ sets it"
        kernel_shape = (shape[0], shape[-1])
        keys = jax.random.split(key, 3)
        parts = [self._query_init(keys[0], kernel_shape, dtype)]
        return jnp.stack(
            [*parts, *(self.kernel_init(k, kernel_shape, dtype) for k in keys[1:])], axis=-2
        )


def _isolate_product(x: Array) -> Array:
    """Put x behind an optimization barrier, so that XLA does not merge a further product that reads x.

    XLA merges unquantized products that share an operand. The merged product requires kernels that concatenate the
    parameters and the gradients and split the result (H200, Llama 8B with 8192 tokens: 0.19 ms per step). Quantized
    products are not merged, because their scales differ, and share the codes of x.
    """
    return lax.optimization_barrier(x) if get_global_quantize_recipe() is None else x

"""Reference layers in Flax and jnp with the engine's module structure, random streams and parameter paths.

Each module takes the fields for the engine's module with the same name as a mapping, and has their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import transformer_engine.jax.flax as te_flax
from tests.jax.test_transformer import relative, rotate_by_complex_numbers
from transformer_engine.jax.router import fused_topk_with_score_function

zeros, ones = nn.initializers.zeros, nn.initializers.ones
CURVES: dict[str, Callable] = {
    "gelu": nn.gelu,
    "silu": nn.silu,
    "relu": nn.relu,
    "linear": lambda x: x,
}


def fan_in(distribution: str = "truncated_normal") -> Callable:
    return nn.initializers.variance_scaling(1.0, "fan_in", distribution)


def partwise_initializer(
    init: Callable, keys: Callable, divisors: tuple[float, ...] = ()
) -> Callable:
    """Initializer for [in, parts, out] that draws each part with a separate key, split from the argument."""

    def draw(key, shape, dtype=jnp.float32):
        each, parts = (shape[0], shape[-1]), shape[1]
        drawn = [init(one, each, dtype) for one in keys(key, parts)]
        divided = (x / d for x, d in zip(drawn, divisors or (1.0,) * parts, strict=True))
        return jnp.stack(list(divided), axis=-2)

    return draw


def one_after_the_other(key, parts):
    for _ in range(parts):
        key, of_part = jax.random.split(key)
        yield of_part


def normalized(module: nn.Module, x, of: Callable):
    """Normalize x with the module's parameters."""
    centered = of("zero_centered_gamma", False)
    scale = module.param("scale", of("scale_init") or (zeros if centered else ones), x.shape[-1:])
    shift = 0.0
    if of("layernorm_type", "layernorm") == "layernorm":
        shift = module.param("ln_bias", of("ln_bias_init", zeros), x.shape[-1:])
        x = x - x.mean(-1, keepdims=True)
    return (
        x / jnp.sqrt((x**2).mean(-1, keepdims=True) + of("epsilon", 1e-6)) * (scale + centered)
        + shift
    )


def has_adapter(scope: str, product: str) -> bool:
    """Whether a scope includes a product: "qkv_proj", "output_proj" or "mlp"."""
    excluded = scope.startswith("exclude_") and scope != f"exclude_{product}"
    return scope in ("all", product) or excluded


def low_rank(module: nn.Module, prefix: str, x, kernel, init: Callable, of: Callable):
    """Compute the low-rank update x @ a @ b * alpha / rank of x @ kernel, with kernel [in, *features]."""
    rank, alpha, between = (
        of("low_rank_adaptation_dim", 32),
        of("low_rank_adaptation_alpha"),
        kernel.shape[1:-1],
    )
    a = module.param(f"{prefix}lora_a_kernel", init, (kernel.shape[0], *between, rank))
    b = module.param(f"{prefix}lora_b_kernel", zeros, (*between, rank, kernel.shape[-1]))
    term = jnp.einsum("...r,...rn->...n", jnp.tensordot(x, a, 1), b)
    return term if alpha is None else term * alpha / rank


class Norm(nn.Module):
    fields: Any

    @nn.compact
    def __call__(self, x):
        of = self.fields.get
        renamed = {"ln_bias_init": of("bias_init", zeros)}
        return normalized(self, x, lambda name, default=None: renamed.get(name, of(name, default)))


class Dense(nn.Module):
    """(norm(x) @ kernel + low-rank update + bias) / depth_scaling, and the norm; normed: a LayerNormDenseGeneral."""

    fields: Any
    normed: bool = False

    @nn.compact
    def __call__(self, x):
        of, inner = self.fields.get, x
        if self.normed and of("enable_layernorm", True):
            inner = normalized(self, x, of)
        features, init = of("features"), of("kernel_init") or fan_in()
        features = features if isinstance(features, tuple) else (features,)
        kernel = self.param("kernel", init, (x.shape[-1], *features))
        y = jnp.tensordot(inner, kernel, 1)
        # DenseGeneral creates its bias first
        result = {} if self.normed else {"bias": self._bias(features)}
        if of("enable_low_rank_adaptation", False):
            y += low_rank(self, "", inner, kernel, init, of)
        y += result["bias"] if result else self._bias(features)
        return y / (of("depth_scaling") or 1.0), inner

    def _bias(self, features):
        used = self.fields.get("use_bias", not self.normed)
        return self.param("bias", self.fields.get("bias_init", zeros), features) if used else 0.0


class MLP(nn.Module):
    fields: Any

    @nn.compact
    def __call__(self, x, deterministic=False):
        of = self.fields.get
        names, f = of("activations", ("gelu",)), of("intermediate_dim", 2048)
        inner = normalized(self, x, of) if of("enable_layernorm", True) else x
        init = of("kernel_init") or fan_in()
        of_parts = partwise_initializer(init, one_after_the_other)
        wi = self.param("wi_kernel", of_parts, (x.shape[-1], len(names), f))
        wo = self.param("wo_kernel", init, (f, x.shape[-1]))
        hidden = self._product("wi_", inner, wi, of_parts)
        hidden = activation_product(hidden, names, of("activation_params"))
        hidden = nn.Dropout(
            of("intermediate_dropout_rate", 0.0),
            of("intermediate_hidden_dropout_dims", ()),
            rng_collection=of("intermediate_dropout_rng_name", "dropout"),
        )(hidden, deterministic=deterministic)
        return self._product("wo_", hidden, wo, init), inner

    def _product(self, prefix, x, kernel, init):
        of, y = self.fields.get, jnp.tensordot(x, kernel, 1)
        if of("enable_low_rank_adaptation", False):
            y += low_rank(self, prefix, x, kernel, init, of)
        return y + (
            self.param(f"{prefix}bias", of("bias_init", zeros), kernel.shape[1:])
            if of("use_bias")
            else 0
        )


def activation_product(x, names, params):
    """Product of n activations, each applied to its slice x [.., n, f]."""
    if names == ("clamped_silu", "clamped_linear"):
        limit, alpha, offset = (
            (params or {}).get(name, default)
            for name, default in (("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0))
        )
        gate = jnp.minimum(x[..., 0, :], limit)
        return (
            gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(x[..., 1, :], -limit, limit) + offset)
        )
    y = 1.0
    for index, name in enumerate(names):
        y = y * (CURVES[name] if isinstance(name, str) else name)(x[..., index, :])
    return y


class Weighted(nn.Module):
    """softmax(scores) @ v with a sink, which is a parameter under this name, and dropout by a key."""

    fields: Any

    @nn.compact
    def __call__(self, q, k, v, bias, hidden, key):
        of = self.fields.get
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores, scale = (
            jnp.einsum("bqhd,bkhd->bhqk", q, k),
            of("scale_factor") or q.shape[-1] ** -0.5,
        )
        if bias is not None and of("attn_bias_type") == "pre_scale_bias":
            scores, bias = scores + bias, None
        scores = scores * scale + (0.0 if bias is None else bias)
        weights = jnp.exp(jnp.where(hidden, -jnp.inf, scores))
        sink = {"vanilla": -jnp.inf, "off_by_one": 0.0}.get(of("softmax_type", "vanilla"))
        if sink is None:
            sink = self.param("softmax_offset", zeros, (1, q.shape[2], 1, 1))
        total = weights.sum(-1, keepdims=True) + jnp.exp(sink)
        weights = weights / jnp.where(total == 0, 1, total)  # rows that see no key are zero
        rate = of("attention_dropout", 0.0)
        if key is not None:
            weights = weights * jax.random.bernoulli(key, 1 - rate, weights.shape) / (1 - rate)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class Core(nn.Module):
    """DotProductAttention on [b, s, h, d]; with transpose_batch_sequence on [s, b, h, d].

    The dropout key is drawn from this module's own stream.
    """

    fields: Any

    @nn.compact
    def __call__(self, q, k, v, mask=None, bias=None, deterministic=False):
        of = self.fields.get
        swap = (
            (lambda x: jnp.swapaxes(x, 0, 1)) if of("transpose_batch_sequence") else (lambda x: x)
        )
        q, k, v = swap(q), swap(k), swap(v)
        kind, window = of("attn_mask_type", "causal"), of("window_size") or (-1, -1)
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
        hidden = (j > i) & ("causal" in kind)
        hidden |= ((j < i - window[0]) & (window[0] >= 0)) | (
            (j > i + window[1]) & (window[1] >= 0)
        )
        # A mask is read by padding, and by a causal mask with a window.
        if mask is not None and ("padding" in kind or ("causal" in kind and of("window_size"))):
            hidden = hidden | mask
        key = None
        if of("attention_dropout", 0.0) and not deterministic:
            key = self.make_rng(of("dropout_rng_name", "dropout"))
        scores = Weighted(self.fields, name="_UnfusedDotProductAttention_0")
        return swap(scores(q, k, v, bias, hidden, key))


class Attention(nn.Module):
    """MultiHeadAttention: (out, the normalized inputs)."""

    fields: Any

    @nn.compact
    def __call__(self, x, source, mask=None, bias=None, deterministic=False):
        of, itself = self.fields.get, x is source
        heads, d = of("num_attention_heads"), of("head_dim")
        groups = of("num_gqa_groups") or heads
        init, scope = of("kernel_init") or fan_in("normal"), of("low_rank_adaptation_scope", "none")
        divisor = d**0.5 if of("scaled_query_init", True) else 1.0
        options = {
            name: of(name)
            for name in (
                "layernorm_type",
                "zero_centered_gamma",
                "use_bias",
                "bias_init",
                "low_rank_adaptation_dim",
                "low_rank_adaptation_alpha",
            )
            if name in self.fields
        }
        options |= {
            "epsilon": of("layernorm_epsilon", 1e-6),
            "enable_layernorm": of("input_layernorm", True),
        }
        options |= {"use_bias": of("use_bias", False)}

        def dense(name, features, init, normed=False):
            adapts = has_adapter(scope, "output_proj" if name == "out" else "qkv_proj")
            fields = {
                "features": features,
                "kernel_init": init,
                "enable_low_rank_adaptation": adapts,
            }
            return Dense(options | fields, normed, name=name)

        def query_init(key, shape, dtype=jnp.float32):
            return init(key, shape, dtype) / divisor

        if of("fuse_qkv_params", True) and itself and groups == heads:
            divisors = (divisor, 1.0, 1.0)
            result, inner = dense(
                "qkv", (3, heads * d), partwise_initializer(init, jax.random.split, divisors), True
            )(x)
            q, k, v = jnp.moveaxis(result, -2, 0)
        else:
            q, inner = dense("query", heads * d, query_init, True)(x)
            source = inner if itself else source
            if of("fuse_qkv_params", True):
                result, _ = dense(
                    "kv", (2, groups * d), partwise_initializer(init, jax.random.split)
                )(source)
                k, v = jnp.moveaxis(result, -2, 0)
            else:
                k, v = (dense(name, groups * d, init)(source)[0] for name in ("key", "value"))
        q, k, v = (y.reshape(*y.shape[:2], -1, d) for y in (q, k, v))
        if of("enable_rotary_pos_emb"):
            swap = (
                (lambda y: jnp.swapaxes(y, 0, 1))
                if of("transpose_batch_sequence")
                else (lambda y: y)
            )
            windows = of("rotary_pos_emb_windows", (1, 10000))
            method = of("rotary_pos_emb_group_method", "consecutive")
            q, k = (swap(rotate_by_complex_numbers(swap(y), windows, method)) for y in (q, k))
        scale = {"scale_factor": d**-0.5 if of("scale_attn_logits", False) else 1.0}
        out = Core(dict(self.fields) | scale, name="DotProductAttention_0")(
            q, k, v, mask, bias, deterministic
        )
        return dense("out", x.shape[-1], init)(out.reshape(*out.shape[:2], -1))[0], inner


class Buckets(nn.Module):
    """RelativePositionBiases with 32 buckets, up to distance 128."""

    heads: int

    @nn.compact
    def __call__(self, queries, keys, bidirectional=True):
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        return relative(self.param("rel_embedding", init, (self.heads, 32)), bidirectional)


class Layer(nn.Module):
    """TransformerLayer."""

    fields: Any
    relative_embedding: nn.Module | None = None

    @nn.compact
    def __call__(self, x, encoded=None, mask=None, cross_mask=None, deterministic=False):
        of, decoder = self.fields.get, encoded is not None
        heads, tokens = (
            of("num_attention_heads"),
            x.shape[0 if of("transpose_batch_sequence") else 1],
        )
        bias = None
        if of("enable_relative_embedding", True):
            result = self.relative_embedding or Buckets(heads, name="relpos_bias")
            bias = result(tokens, tokens, not decoder)
        argument = dict(self.fields) | {
            "head_dim": x.shape[-1] // heads,
            "kernel_init": of("mha_kernel_init"),
            "attention_dropout": of("attention_dropout", 0.1),
            "input_layernorm": not of("output_layernorm", False),
            "attn_mask_type": of("self_attn_mask_type", "causal"),
            "attn_bias_type": of("self_attn_bias_type"),
        }
        name = "self_attention" if decoder else "attention"
        y, inner = Attention(argument, name=name)(x, x, mask, bias, deterministic)
        x = self._joined(y, x, inner, deterministic)
        if decoder:
            argument |= {"attn_mask_type": "padding", "input_layernorm": True}
            cross = Attention(argument, name="encoder_decoder_attention")
            y, inner = cross(x, encoded, cross_mask, None, deterministic)
            x = self._joined(y, x, inner, deterministic, skipped=False)
        y, inner = MLP(self._mlp_fields(), name="mlp")(x, deterministic)
        x = self._joined(y, x, inner, deterministic)
        norm = {"epsilon": of("layernorm_epsilon", 1e-6)}
        return (
            Norm(self._kinds() | norm, name="output_layernorm")(x) if of("output_layernorm") else x
        )

    def _kinds(self):
        return {
            name: self.fields[name]
            for name in ("layernorm_type", "zero_centered_gamma")
            if name in self.fields
        }

    def _mlp_fields(self):
        of = self.fields.get
        saved = ("use_bias", "bias_init", "low_rank_adaptation_dim", "low_rank_adaptation_alpha")
        return (
            {name: of(name) for name in saved if name in self.fields}
            | self._kinds()
            | {
                "intermediate_dim": of("mlp_hidden_size"),
                "epsilon": of("layernorm_epsilon", 1e-6),
                "kernel_init": of("mlp_kernel_init"),
                "activations": of("mlp_activations", ("gelu",)),
                "activation_params": of("mlp_activation_params"),
                "intermediate_dropout_rng_name": of("dropout_rng_name", "dropout"),
                "intermediate_dropout_rate": of("intermediate_dropout", 0.0),
                "intermediate_hidden_dropout_dims": of("intermediate_dropout_dims", ()),
                "enable_low_rank_adaptation": has_adapter(
                    of("low_rank_adaptation_scope", "none"), "mlp"
                ),
            }
        )

    def _joined(self, y, residual, inner, deterministic, skipped=True):
        of = self.fields.get
        stream = {"rng_collection": of("dropout_rng_name", "dropout")}
        drop = nn.Dropout(of("hidden_dropout", 0.1), of("hidden_dropout_dims", ()), **stream)
        y = drop(y, deterministic=deterministic)
        if skipped and of("drop_path", 0.0):
            rows = (0, 2) if of("transpose_batch_sequence") else (1, 2)
            y = nn.Dropout(of("drop_path"), rows, **stream)(y, deterministic=deterministic)
        return y + (inner if of("apply_residual_connection_post_layernorm") else residual)


def routing_weights(logits, bias, of: Callable):
    """Routing weights [T, E], 0 for experts that a token does not use, and the selected experts."""
    k, sigmoid = of("num_experts_per_tok", 2), of("score_function", "softmax") == "sigmoid"
    dense = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
    before = sigmoid or of("use_pre_softmax", False)
    judged = jax.lax.stop_gradient((dense if before else logits) + bias)
    if (groups := of("num_groups", -1)) > 0:
        best = of("group_topk", -1)
        strength = jnp.sort(judged.reshape(len(judged), groups, -1))[..., -(k // best) :].sum(-1)
        saved = strength >= jnp.sort(strength)[:, -best, None]
        judged = jnp.where(jnp.repeat(saved, logits.shape[1] // groups, axis=1), judged, -jnp.inf)
    chosen = judged >= jnp.sort(judged)[:, -k, None]
    weights = jnp.where(chosen, dense if before else jnp.exp(logits), 0.0)
    if not before or (sigmoid and k > 1):
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * of("scaling_factor", 1.0), chosen


class Experts(nn.Module):
    """_MoEBlock: every expert for every token, weighted; and the loss that balances them."""

    fields: Any

    @nn.compact
    def __call__(self, x):
        of, (_, _, width) = self.fields.get, x.shape
        count, inner, init = (
            of("num_experts"),
            of("intermediate_size"),
            of("kernel_init") or fan_in(),
        )

        def expert_rows(key, shape, dtype=jnp.float32):
            return jnp.stack([init(one, shape[1:], dtype) for one in jax.random.split(key, count)])

        def affine(name, rows, columns):
            kernel = self.param(name, expert_rows, (count, rows, columns))
            biased = of("use_ffn_bias", False)
            bias = (
                self.param(f"{name}_bias", of("bias_init", zeros), (count, columns))
                if biased
                else 0.0
            )
            return lambda x: jnp.einsum("te...k,ekn->te...n", x, kernel) + bias

        logits = x.reshape(-1, width) @ self.param("gate_kernel", init, (width, count))
        both = affine("wi", width, 2 * inner)
        last = affine("wo", inner, width)
        bias = (
            self.param("expert_bias", zeros, (count,))
            if of("use_expert_routing_bias", False)
            else 0.0
        )
        tokens = jnp.repeat(x.reshape(-1, 1, width), count, axis=1)
        gate, linear = jnp.split(both(tokens), 2, axis=-1)
        hidden = CURVES[of("activation_type", "silu")](gate) * linear
        weights, chosen = routing_weights(logits, bias, of)
        # Weights applied before the last product do not scale its bias.
        factors = (weights, chosen) if of("apply_topk_weights_early", False) else (chosen, weights)
        result = last(hidden * factors[0][..., None])
        y, coeff = (
            (result * factors[1][..., None]).sum(1).reshape(x.shape),
            of("aux_loss_coeff", 0.0),
        )
        if not coeff:
            return y, None
        kind = of("score_function", "softmax")
        scores, _ = fused_topk_with_score_function(
            logits, 1, score_function=kind, compute_aux_scores=True
        )
        share = coeff * count / (of("num_experts_per_tok", 2) * len(logits) ** 2)
        return y, share * (chosen.sum(0) * scores.sum(0)).sum()


PLAIN: dict[type[nn.Module], Callable[..., nn.Module]] = {
    te_flax.DenseGeneral: lambda **fields: Dense(fields),
    te_flax.LayerNorm: lambda **fields: Norm(fields),
    te_flax.LayerNormDenseGeneral: lambda **fields: Dense(fields, normed=True),
    te_flax.LayerNormMLP: lambda **fields: MLP(fields),
    te_flax.DotProductAttention: lambda **fields: Core(fields),
    te_flax.MultiHeadAttention: lambda **fields: Attention(fields),
    te_flax._MoEBlock: lambda **fields: Experts(fields),
    te_flax.TransformerLayer: lambda relative_embedding=None, **fields: Layer(
        fields, relative_embedding
    ),
}

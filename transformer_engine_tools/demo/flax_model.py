"""logits [batch, sequence, 256] for bytes, in Flax: embedding, causal TransformerLayer blocks, RMSNorm, head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array

from transformer_engine.jax import flax as te_flax

from .config import VOCABULARY, RunConfig

# Fields in every block; modules compute in their inputs' dtype, parameters are float32.
_BLOCK: dict[str, Any] = {
    "layernorm_type": "rmsnorm",
    "layernorm_epsilon": 1e-5,
    "mlp_activations": ("silu", "linear"),
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "self_attn_mask_type": "causal",
    "enable_relative_embedding": False,
    "enable_rotary_pos_emb": True,
    "scaled_query_init": False,
    "scale_attn_logits": True,
}
_NORMAL = nn.initializers.normal(0.02)


class FlaxByteGPT(nn.Module):
    """The torch demonstration's blocks: causal, rotary positions, RMSNorm and SwiGLU, no biases.

    The blocks' products follow the recipe in force where the model is traced; embedding, last norm and head do not.
    """

    config: RunConfig

    @nn.compact
    def __call__(self, tokens: Array, decode: bool = False) -> Array:
        """Compute logits for tokens [batch, sequence]; `decode` caches keys and values, reading one token per call."""
        config, dtype = self.config, jnp.dtype(self.config.precision)
        embedding = self.param("embedding", _NORMAL, (VOCABULARY, config.hidden), jnp.float32)
        hidden = embedding.astype(dtype)[tokens]
        for number in range(config.layers):
            layer = te_flax.TransformerLayer(
                hidden_size=config.hidden,
                mlp_hidden_size=config.feed_forward,
                num_attention_heads=config.heads,
                mha_kernel_init=_NORMAL,
                mlp_kernel_init=_NORMAL,
                name=f"layer_{number}",
                **_BLOCK,
            )
            hidden = layer(hidden, deterministic=True, decode=decode)
        hidden = te_flax.LayerNorm(epsilon=1e-5, layernorm_type="rmsnorm", name="norm")(hidden)
        head = self.param("head", _NORMAL, (config.hidden, VOCABULARY), jnp.float32)
        return hidden @ head.astype(dtype)


def initial_variables(config: RunConfig, key: Array) -> dict[str, Any]:
    """Initialize the model's variables without boxes; residual branches shrink with depth, as in GPT-2.

    The sum over 2 * layers branches then keeps its variance.
    """
    model = FlaxByteGPT(config)
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    variables: Any = nn.meta.unbox(model.init({"params": key, "sr_rng": key}, tokens))
    shrink = (2 * config.layers) ** -0.5

    def shrunk(path: Any, weight: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return weight * shrink if name.endswith(("out/kernel", "wo_kernel")) else weight

    return {**variables, "params": jax.tree_util.tree_map_with_path(shrunk, variables["params"])}


def mean_loss(
    config: RunConfig, variables: Any, tokens: Array, targets: Array, key: Array
) -> Array:
    """Compute the mean cross-entropy in nats per byte, in float32; `key` is for stochastic rounding."""
    logits = FlaxByteGPT(config).apply(variables, tokens, rngs={"sr_rng": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(
        jnp.asarray(logits, jnp.float32), targets
    )
    return losses.mean()

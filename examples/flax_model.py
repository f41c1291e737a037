"""Train a Flax model in FP8 on JAX: `python examples/flax_model.py`.

The scales of delayed scaling are a collection of variables. The gradient with respect to the collection is its next
value, so a step returns it like a gradient.
"""

from __future__ import annotations

import argparse
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common.recipe import DelayedScaling

VOCABULARY = 64


class Decoder(nn.Module):
    """A causal language model: logits [batch, sequence, VOCABULARY] of tokens [batch, sequence]."""

    layers: int
    hidden: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, self.hidden)(tokens)
        for _ in range(self.layers):
            x = te_flax.TransformerLayer(
                hidden_size=self.hidden,
                mlp_hidden_size=2 * self.hidden,
                num_attention_heads=4,
                layernorm_type="rmsnorm",
                mlp_activations=("silu", "linear"),
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                enable_relative_embedding=False,
                enable_rotary_pos_emb=True,
                scale_attn_logits=True,
                scaled_query_init=False,
            )(x, deterministic=True)
        return nn.Dense(VOCABULARY)(te_flax.LayerNorm(layernorm_type="rmsnorm")(x))


def rows_of(key: jax.Array) -> jax.Array:
    """Rows [16, 33] that increase by a stride: two tokens determine the next token."""
    first, stride = jax.random.randint(key, (2, 16, 1), 1, 8)
    rows: jax.Array = (first + stride * jnp.arange(33)) % VOCABULARY
    return rows


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=1, help="Transformer layers (default: %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default: %(default)s)")
    options = parser.parse_args(argv)
    model, optimizer = Decoder(options.layers, options.hidden), optax.adamw(3e-3)

    @jax.jit
    def step_of(
        params: Any, state: Any, moments: Any, key: jax.Array
    ) -> tuple[Any, Any, Any, jax.Array]:
        tokens = rows_of(key)

        def loss_of(params: Any, state: Any) -> jax.Array:
            logits: Any = model.apply({"params": params, **state}, tokens[:, :-1])
            losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            )
            return losses.mean()

        loss, (gradients, state) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, state)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    losses = []
    # needed while a step is traced
    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
        variables = jax.jit(model.init)(jax.random.key(0), rows_of(jax.random.key(0))[:, :-1])
        state, params = flax.core.pop(nn.meta.unbox(variables), "params")
        moments = optimizer.init(params)
        for step in range(options.steps):
            params, state, moments, loss = step_of(params, state, moments, jax.random.key(1 + step))
            losses.append(float(loss))
            if step % 20 == 0 or step == options.steps - 1:
                print(f"step {step + 1:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

"""Train an NNX model in FP8 on JAX: `python examples/nnx_model.py`.

`bridged` turns a Flax module of this package into an NNX module that holds its parameters and scales, and
`value_and_grad` writes the next scales into it.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.jax.nnx import bridged, value_and_grad


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the losses of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default: %(default)s)")
    options = parser.parse_args(argv)

    losses = []
    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
        x = jax.random.normal(jax.random.key(0), (64, options.hidden))
        target = jnp.tanh(x[:, ::-1])
        layer = te_flax.LayerNormMLP(intermediate_dim=2 * options.hidden, activations=("gelu",))
        model = bridged(layer, nnx.Rngs(0), x)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step_of(model: Any, optimizer: nnx.Optimizer[Any]) -> jax.Array:
            def loss_of(model: Any, x: jax.Array) -> jax.Array:
                output, _ = model(x)
                return jnp.mean((output - target) ** 2)

            loss: jax.Array
            loss, gradients = value_and_grad(loss_of, model, x)
            optimizer.update(model, gradients)
            return loss

        for step in range(options.steps):
            losses.append(float(step_of(model, optimizer)))
            if step % 20 == 0 or step == options.steps - 1:
                print(f"step {step + 1:4}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()

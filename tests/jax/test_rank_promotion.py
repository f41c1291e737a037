"""Layers under jax_numpy_rank_promotion="raise", by which users find broadcasts that they did not mean."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe

biased = {"use_bias": True, "bias_init": nn.initializers.normal(0.3)}
LAYERS = {
    "dense": te_flax.DenseGeneral(features=(2, 16), bias_init=biased["bias_init"]),
    "layernorm": te_flax.LayerNorm(),
    "rmsnorm": te_flax.LayerNorm(layernorm_type="rmsnorm"),
    "layernorm and dense": te_flax.LayerNormDenseGeneral(features=16, **biased),
    "mlp": te_flax.LayerNormMLP(intermediate_dim=32, activations=("silu", "linear"), **biased),
}
RECIPES = {
    "values": None, "delayed": recipe.DelayedScaling(amax_history_len=2), "current": recipe.Float8CurrentScaling(),
}  # fmt: skip


@pytest.mark.parametrize("of", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_broadcast_by_name_alone(name, of):
    x, settings = jax.random.normal(jax.random.key(0), (2, 16, 32)), RECIPES[of]

    def step(promotion):
        def loss(variables, x):
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(LAYERS[name].apply(variables, x)))

        quantized = nullcontext() if settings is None else te.autocast(True, settings)
        with jax.numpy_rank_promotion(promotion), quantized:
            variables = nn.meta.unbox(LAYERS[name].init(jax.random.key(1), x))
            return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

    jax.tree.map(np.testing.assert_array_equal, step("allow"), step("raise"))

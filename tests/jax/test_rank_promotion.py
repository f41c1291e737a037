"""Layers under the options that report unintended rank broadcasts, dtype promotions and leaks."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_unboxed_variables, normal, ones
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
    "values": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
}


@pytest.mark.parametrize("of", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled(3)
def test_layers_need_no_rank_promotion(name, of):
    x, settings = normal(jax.random.key(0), (2, 16, 32)), RECIPES[of]

    def step(promotion):
        def loss(variables, x):
            return sum(jnp.sin(y).sum() for y in jax.tree.leaves(LAYERS[name].apply(variables, x)))

        quantized = nullcontext() if settings is None else te.autocast(True, settings)
        with jax.numpy_rank_promotion(promotion), quantized:
            variables = draw_unboxed_variables(LAYERS[name], x)
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    jax.tree.map(np.testing.assert_array_equal, step("allow"), step("raise"))


LORA = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4}
MODULES = {
    "dense": te_flax.DenseGeneral(features=(2, 32), bias_init=biased["bias_init"]),
    "layernorm and dense": te_flax.LayerNormDenseGeneral(features=32, **biased, **LORA),
    "mlp": te_flax.LayerNormMLP(
        intermediate_dim=64, activations=("silu", "linear"), **biased, **LORA
    ),
    "layer": te_flax.TransformerLayer(
        hidden_size=64,
        mlp_hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_bias=True,
    ),
    "experts": te_flax._MoEBlock(
        num_experts=4, num_experts_per_tok=2, intermediate_size=64, aux_loss_coeff=0.01
    ),
}
OF_MODULES = RECIPES | {
    "blocks": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
OPTIONS = {
    "numpy_rank_promotion": "raise",
    "numpy_dtype_promotion": "strict",
    "enable_x64": True,
    "check_tracer_leaks": True,
}
# Every option with stochastic rounding, every recipe under the option that most code meets; experts take no NVFP4.
UNDER = [
    ("dense", "nvfp4", "check_tracer_leaks"),
    *(("layer", "nvfp4", option) for option in OPTIONS if option != "numpy_rank_promotion"),
    *(("experts", "delayed", option) for option in OPTIONS if option != "numpy_rank_promotion"),
    *(
        (name, of, "numpy_rank_promotion")
        for name in MODULES
        for of in OF_MODULES
        if (name, of) != ("experts", "nvfp4")
    ),
]


@pytest.mark.parametrize(("name", "of", "option"), UNDER)
@pytest.mark.sampled(3)
def test_modules_and_their_gradients_are_traced_under_options(name, of, option, request):
    """An option rejects a call while a program is traced."""
    x, settings, module = ones((2, 16, 64)), OF_MODULES[of], MODULES[name]
    options = {"deterministic": True} if name in ("mlp", "layer") else {}
    keys = {"sr_rng": jax.random.key(3)}

    def loss(variables, x):
        result = jax.tree.leaves(module.apply(variables, x, rngs=keys, **options))
        return sum(jnp.sin(y).sum() for y in result if jnp.issubdtype(y.dtype, jnp.floating))

    previous = getattr(jax.config, f"jax_{option}")
    request.addfinalizer(lambda: jax.config.update(f"jax_{option}", previous))
    request.addfinalizer(jax.clear_caches)
    jax.config.update(f"jax_{option}", OPTIONS[option])
    jax.clear_caches()  # a program that was traced without the option passes it
    with nullcontext() if settings is None else te.autocast(True, settings):
        init = functools.partial(module.init, {"params": jax.random.key(1), **keys}, **options)
        variables = nn.meta.unbox(jax.eval_shape(init, x))
        traced = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True)).trace(variables, x)
    assert jax.tree.structure(traced.out_info[0]) == jax.tree.structure(variables)

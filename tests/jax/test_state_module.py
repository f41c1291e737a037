"""Other people's modules and functions with FP8 products, whose state TrainState overwrites."""

from __future__ import annotations

from typing import Any

import flax
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, ones
from transformer_engine.common import recipe
from transformer_engine.jax.dense import dense

RECIPE = recipe.DelayedScaling(amax_history_len=4)


class Net(nn.Module):
    """Two Flax dense layers."""

    @nn.compact
    def __call__(self, x):
        product = te_flax.make_dot_general_cls(RECIPE)
        x = nn.relu(nn.Dense(32, dot_general=product())(x))
        return nn.Dense(8, dot_general=product())(x)


def test_a_train_state_overwrites_the_quantizers_state():
    x = normal(jax.random.key(0), (64, 16))
    target = x[:, :8]
    model = Net()
    variables = jax.jit(model.init)(jax.random.key(1), x)
    assert set(variables) == {"params", "_overwrite_with_gradient"}
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda p: ((model.apply(p, x) - target) ** 2).mean())(
            state.params
        )
        return loss, state.apply_gradients(grads=grads)

    losses = []
    for _ in range(30):
        loss, state = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    (first, *_) = flax.traverse_util.flatten_dict(state.params["_overwrite_with_gradient"]).items()
    scales = {
        path: leaf
        for path, leaf in flax.traverse_util.flatten_dict(
            state.params["_overwrite_with_gradient"]
        ).items()
        if path[-1] == "x_scale"
    }
    assert len(scales) == 2
    assert first[0][-1] in {
        f"{t}_{leaf}" for t in ("x", "kernel", "grad") for leaf in ("scale", "amax_history")
    }
    # The first layer's input never changes, so its maximum determines the scale.
    assert any(
        float(s[0]) == float(np.float32(448) / np.abs(np.asarray(x)).max()) for s in scales.values()
    )


def test_a_function_gets_a_quantizer_set_for_each_postfix():
    def two_products(generate_quantizer_set, x, a, b):
        hidden = dense(x, a, quantizer_set=generate_quantizer_set("_a"))
        return dense(hidden, b, quantizer_set=generate_quantizer_set("_b"))

    module = te_flax.wrap_function_in_te_state_module(two_products, RECIPE, "pair")
    assert module.__name__ == "TEWrapper_pair"
    x, a, b = ones((4, 8)), ones((8, 6)), ones((6, 2))
    variables = draw_variables(module(), x, a, b)
    names = {
        f"{t}_{p}_{leaf}"
        for t in ("x", "kernel", "grad")
        for p in "ab"
        for leaf in ("scale", "amax_history")
    }
    assert set(variables["_overwrite_with_gradient"]) == names
    np.testing.assert_allclose(module().apply(variables, x, a, b), x @ a @ b)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: te_flax.wrap_function_in_te_state_module("f", RECIPE), "is not a function"),
        (
            lambda: te_flax.wrap_function_in_te_state_module(lambda g: g, "delayed"),
            "instance of a recipe",
        ),
        (
            lambda: te_flax.make_dot_general_cls(RECIPE)().init(
                jax.random.key(0), ones((2, 3, 4)), ones((2, 4, 5)), (((2,), (1,)), ((0,), (0,)))
            ),
            "the product has none",
        ),
    ],
)
def test_a_bad_call_is_rejected_with_value_limit_and_remedy(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()


@pytest.mark.parametrize(
    ("settings", "tolerance"), [(None, 1e-5), (recipe.Float8CurrentScaling(), 0.1)]
)
def test_linear_layers_of_nnx_accept_the_product(settings, tolerance):
    from flax import nnx

    x = normal(jax.random.key(0), (16, 32))
    for layer in (nnx.Linear, nnx.LinearGeneral):
        product = nnx.bridge.ToNNX(te_flax.make_dot_general_cls(settings)(), rngs=nnx.Rngs(0))
        actual = layer(32, 16, rngs=nnx.Rngs(0), dot_general=product)(x)
        expected = layer(32, 16, rngs=nnx.Rngs(0))(x)
        assert np.linalg.norm(actual - expected) < tolerance * np.linalg.norm(expected)


def test_the_product_accepts_the_arguments_of_lax_dot_general():
    x, kernel = normal(jax.random.key(0), (16, 32)), normal(jax.random.key(1), (32, 8))
    module: Any = te_flax.make_dot_general_cls(None)()
    numbers = (((1,), (0,)), ((), ()))
    expected, actual = x @ kernel, None
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for options in (
            {"dims": numbers},
            {"dimension_numbers": numbers, "out_sharding": None, "precision": None},
            {"dimension_numbers": numbers, "out_sharding": jax.sharding.PartitionSpec("dp")},
        ):
            actual = module.apply({}, x, kernel, **options)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        assert jax.typeof(actual).sharding.spec == jax.sharding.PartitionSpec("dp", None)
    with pytest.raises(TypeError, match="give one of them"):
        module.apply({}, x, kernel)

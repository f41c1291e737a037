"""Norms, activations and layers with them against plain jnp: values, every gradient, trees, bad calls."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import (
    draw_unboxed_variables,
    init_variables,
    normal,
    ones,
    values_and_gradients,
    zeros,
)
from transformer_engine.common import recipe
from transformer_engine.jax.activation import activation
from transformer_engine.jax.functions import products
from transformer_engine.jax.functions.sources import ActivationSource
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.primitives.activation import ActivationParams, activation_backward
from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
from transformer_engine.jax.runtime.residual import bypass

RECIPES = {
    "none": (None, 2e-5),
    "delayed": (recipe.DelayedScaling(), 0.15),
    "current": (recipe.Float8CurrentScaling(), 0.15),
    "block": (recipe.Float8BlockScaling(), 0.1),
    "mxfp8": (recipe.MXFP8BlockScaling(), 0.1),
}
CURVES = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jax.nn.relu(x) ** 2,
    "linear": lambda x: x,
}


def relative_error(got, expected) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def assert_close(got, expected, tolerance):
    for path, (one, other) in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True),
        strict=True,
    ):
        assert one.dtype == other.dtype, path[0]
        assert relative_error(one, other) < tolerance, path[0]


def plain_norm(x, gamma, beta, kind, zero_centered=False, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    if kind == "layernorm":
        wide = wide - wide.mean(-1, keepdims=True)
    y = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * (gamma + zero_centered)
    return (y if beta is None else y + beta).astype(x.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("kind", "zero_centered"), [("layernorm", False), ("layernorm", True), ("rmsnorm", False)]
)
def test_norms_and_their_gradients(kind, zero_centered, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x = (3 + normal(keys[0], (2, 5, 24))).astype(dtype)
    gamma = normal(keys[1], (24,))
    beta = normal(keys[2], (24,)) if kind == "layernorm" else None
    dy = normal(keys[3], x.shape).astype(dtype)
    ours = values_and_gradients(
        lambda *a: layernorm(*a, kind, zero_centered, 1e-5), dy, x, gamma, beta
    )
    plain = values_and_gradients(
        lambda *a: plain_norm(*a, kind, zero_centered, 1e-5), dy, x, gamma, beta
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    assert_close(ours, plain, tolerance)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_sum_of_residual_and_norm_gradient_is_rounded_once(kind):
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy, add = (normal(key, (3, 5, 24)).astype(jnp.bfloat16) for key in keys)
    gamma, beta = (
        jnp.linspace(0.5, 1.5, 24),
        jnp.linspace(-1, 1, 24) if kind == "layernorm" else None,
    )

    @jax.jit
    def join_both(x):
        def join_parts(x):
            with bypass(x, True) as residual:
                y = layernorm(x, gamma, beta, kind)
            return y, residual.value

        return jax.vjp(join_parts, x)[1]((dy, add))[0]

    wide = jax.jit(
        lambda x: jax.vjp(lambda x: layernorm(x, gamma, beta, kind), x)[1](dy.astype(jnp.float32))[
            0
        ]
    )
    expected = (wide(x.astype(jnp.float32)) + add.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        np.asarray(join_both(x), np.float32), np.asarray(expected, np.float32)
    )


@pytest.mark.parametrize("settings", [None, recipe.DelayedScaling()])
@pytest.mark.parametrize(
    ("fields", "products"), [({}, 1), ({"num_gqa_groups": 2}, 2), ({"fuse_qkv_params": False}, 3)]
)
@pytest.mark.sampled
def test_a_layers_gradients_of_its_input_are_added_by_the_norms(fields, products, settings):
    """Two [2, 16, 64] additions remain: in the layer, and for the products after the attention's norm."""
    layer = te_flax.TransformerLayer(
        hidden_size=64,
        mlp_hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        enable_relative_embedding=False,
        layernorm_type="rmsnorm",
        dtype=jnp.bfloat16,
        **fields,
    )
    x = ones((2, 16, 64), jnp.bfloat16)
    with te.autocast(settings is not None, settings):
        variables = nn.meta.unbox(
            jax.eval_shape(lambda: layer.init(jax.random.key(0), x, deterministic=True))
        )

        def step(variables, x):
            y, pullback = jax.vjp(lambda v, x: layer.apply(v, x, deterministic=True), variables, x)
            return y, pullback(y)

        text = str(jax.make_jaxpr(step)(variables, x))
    added = re.findall(r":bf16\[2,16,64\] = add(?:_any)? ", text)
    assert len(added) == 2 + products - 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fields", [{"apply_residual_connection_post_layernorm": True}, {"output_layernorm": True}]
)
def test_gradients_are_right_without_a_residual_around_a_norm(fields):
    """The residual is a norm's result, or no norm precedes the attention."""
    layer = te_flax.TransformerLayer(
        hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        enable_relative_embedding=False, **fields,
    )  # fmt: skip
    x = normal(jax.random.key(0), (2, 8, 32))
    variables = draw_unboxed_variables(layer, x, deterministic=True)
    apply = jax.jit(lambda x: layer.apply(variables, x, deterministic=True))
    along, dy = (np.asarray(normal(jax.random.key(seed), x.shape)) for seed in (1, 2))
    step = 1e-2
    ahead, distance = (np.asarray(apply(x + sign * step * along)) for sign in (1, -1))
    expected = ((ahead - distance) * dy).sum() / (2 * step)
    _, dx = values_and_gradients(apply, dy, x)
    np.testing.assert_allclose((np.asarray(dx) * along).sum(), expected, rtol=2e-2)


@pytest.mark.parametrize("name", ["RMSNorm", "RMS-Norm", "rms_norm", "LayerNorm"])
def test_norm_names_are_taken_in_any_case(name):
    x = jnp.arange(8.0).reshape(2, 4)
    beta = None if name.lower().startswith("rms") else zeros(4)
    kind = "rmsnorm" if beta is None else "layernorm"
    np.testing.assert_allclose(
        layernorm(x, ones(4), beta, name), plain_norm(x, ones(4), beta, kind), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", [n for n in CURVES if n != "linear"])
@pytest.mark.sampled
def test_activations_and_their_gradients(name, gated):
    names = (name, "linear") if gated else (name,)
    x = normal(jax.random.key(0), (3, len(names), 16))
    dy = normal(jax.random.key(1), (3, 16))

    def plain(x):
        y = CURVES[name](x[..., 0, :])
        return y * x[..., 1, :] if gated else y

    ours = values_and_gradients(lambda x: activation(x, names), dy, x)
    assert_close(ours, values_and_gradients(plain, dy, x), 1e-5)


def test_the_clamped_activation_has_derivative_one_at_its_bounds():
    names = ("clamped_silu", "clamped_linear")
    at, below, beyond = (
        jax.grad(lambda x: activation(x, names).sum())(
            jnp.asarray([[[gate], [linear]]], jnp.float32)
        )[0, :, 0]
        for gate, linear in ((7.0, -7.0), (6.99999, -6.99999), (7.00001, -7.00001))
    )
    np.testing.assert_allclose(at, below, rtol=1e-4)
    assert not np.asarray(beyond).any()


def test_the_clamped_activation_follows_its_parameters():
    x = 8 * normal(jax.random.key(0), (3, 2, 16))
    params = {"limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5}
    gate, linear = jnp.minimum(x[:, 0], 5.0), jnp.clip(x[:, 1], -5.0, 5.0)
    expected = gate * jax.nn.sigmoid(1.5 * gate) * (linear + 0.5)
    np.testing.assert_allclose(
        activation(x, ("clamped_silu", "clamped_linear"), act_params=params),
        expected,
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_quantizer_rounds_a_norm_to_its_codes_and_advances():
    x = normal(jax.random.key(0), (8, 32))
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        quantizer = QuantizerFactory.create_set().x
    plain = layernorm(x, ones(32), None, "rmsnorm")
    y, _, following = values_and_gradients(
        lambda x, q: layernorm(x, ones(32), None, "rmsnorm", quantizer=q),
        jnp.ones_like(x),
        x,
        quantizer,
    )
    rounded = jax.jit(lambda values: quantizer.encode(values)[0].dequantize())(plain)
    np.testing.assert_array_equal(y, rounded)
    assert following.amax_history[-1] == jnp.abs(plain).max()


@pytest.mark.parametrize(
    ("kind", "name"), [*(("layernorm", name) for name in RECIPES), ("rmsnorm", "none")]
)
@pytest.mark.sampled(2)
def test_a_norm_and_a_product(kind, name):
    settings, tolerance = RECIPES[name]
    keys = jax.random.split(jax.random.key(0), 5)
    x, kernel = normal(keys[0], (2, 32, 64)), normal(keys[1], (64, 32))
    gamma, bias = 1 + 0.1 * normal(keys[2], (64,)), normal(keys[3], (32,))
    beta = zeros(64) if kind == "layernorm" else None
    with te.autocast(settings is not None, settings):
        quantizers = QuantizerFactory.create_set()

    def ours(x, kernel, gamma, bias):
        return layernorm_dense(x, kernel, gamma, beta, bias, kind, quantizer_set=quantizers)

    def plain(x, kernel, gamma, bias):
        return plain_norm(x, gamma, beta, kind) @ kernel + bias

    dy = normal(keys[4], (2, 32, 32))
    actual, expected = (values_and_gradients(f, dy, x, kernel, gamma, bias) for f in (ours, plain))
    assert_close(actual, expected, tolerance)


def plain_mlp(x, gamma, beta, kernels, biases, kind, names):
    hidden = jnp.einsum("...h,hnf->...nf", plain_norm(x, gamma, beta, kind), kernels[0])
    if biases[0] is not None:
        hidden = hidden + biases[0]
    y = CURVES[names[0]](hidden[..., 0, :])
    for index, name in enumerate(names[1:], 1):
        y = y * CURVES[name](hidden[..., index, :])
    y = y @ kernels[1]
    return y if biases[1] is None else y + biases[1]


@pytest.mark.parametrize(
    ("names", "biased", "name"),
    [*((("gelu",), True, name) for name in RECIPES), (("silu", "linear"), False, "none")],
)
@pytest.mark.sampled(2)
def test_a_norm_followed_by_an_mlp(names, biased, name):
    settings, tolerance = RECIPES[name]
    keys = jax.random.split(jax.random.key(0), 6)
    x, gamma, beta = normal(keys[0], (2, 32, 64)), ones(64), zeros(64)
    kernels = normal(keys[1], (64, len(names), 32)) / 8, normal(keys[2], (32, 64)) / 6
    biases = (normal(keys[3], (len(names), 32)), normal(keys[4], (64,))) if biased else (None, None)
    with te.autocast(settings is not None, settings):
        sets = QuantizerFactory.create_set(n_quantizer_sets=2)

    def ours(x, gamma, beta, kernels, biases):
        return layernorm_mlp(
            x, gamma, beta, kernels, biases, "layernorm", activation_type=names, quantizer_sets=sets
        )

    def plain(x, gamma, beta, kernels, biases):
        return plain_mlp(x, gamma, beta, kernels, biases, "layernorm", names)

    arguments = (x, gamma, beta, kernels, biases)
    dy = normal(keys[5], x.shape)
    actual, expected = (values_and_gradients(f, dy, *arguments) for f in (ours, plain))
    assert_close(actual, expected, tolerance)


def test_sums_of_a_bias_are_rounded_once_to_its_own_dtype():
    """Under NVFP4, which activations do not quantize, a float32 bias must not get sums rounded to x's bfloat16."""
    keys = jax.random.split(jax.random.key(0))
    dy, x = (
        normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((64, 32), (64, 1, 32)), strict=True)
    )
    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.NVFP4_1D_SCALING, q_dtype=jnp.float4_e2m1fn
    )
    names, params = ("gelu",), ActivationParams()
    *_, sums = ActivationSource(names, params).encode_gradient(x, dy, quantizer, jnp.float32)
    dx = np.asarray(activation_backward(dy, x, names, params), np.float64)
    assert sums is not None and sums.dtype == jnp.float32
    np.testing.assert_allclose(sums, dx.sum(axis=0), rtol=0, atol=1e-5)


MLP_FIELDS = [
    {},
    {"use_bias": True, "layernorm_type": "rmsnorm"},
    {"activations": ("silu", "linear"), "return_layernorm_output": True},
    {"activations": ("gelu", jnp.tanh), "use_bias": True},
    {"enable_layernorm": False, "activations": (jnp.sin,)},
    {"zero_centered_gamma": True, "use_bias": True},
    {"intermediate_dropout_rate": 0.5, "intermediate_hidden_dropout_dims": (-2,)},
    {
        "enable_low_rank_adaptation": True,
        "low_rank_adaptation_dim": 4,
        "low_rank_adaptation_alpha": 2.0,
    },
]


@pytest.mark.parametrize("fields", MLP_FIELDS, ids=lambda fields: "-".join(fields) or "defaults")
@pytest.mark.sampled(3)
def test_the_mlp_module_equals_the_reference_module(fields):
    x = normal(jax.random.key(0), (3, 5, 16))
    model = te_flax.LayerNormMLP(intermediate_dim=24, **fields)
    params = draw_unboxed_variables(model, x)["params"]
    names = fields.get("activations", ("gelu",))
    normed = fields.get("enable_layernorm", True)
    kind = fields.get("layernorm_type", "layernorm")
    shapes = {"wi_kernel": (16, len(names), 24), "wo_kernel": (24, 16)}
    shapes |= {"scale": (16,)} if normed else {}
    shapes |= {"ln_bias": (16,)} if normed and kind == "layernorm" else {}
    shapes |= {"wi_bias": (len(names), 24), "wo_bias": (16,)} if fields.get("use_bias") else {}
    if fields.get("enable_low_rank_adaptation"):
        shapes |= {"wi_lora_a_kernel": (16, 1, 4), "wi_lora_b_kernel": (1, 4, 24)}
        shapes |= {"wo_lora_a_kernel": (24, 4), "wo_lora_b_kernel": (4, 16)}
    assert jax.tree.map(jnp.shape, params) == shapes
    if normed:
        streams = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
        first = jax.jit(lambda: nn.meta.unbox(model.init(streams, x))["params"]["scale"])()
        np.testing.assert_array_equal(
            first, np.full(16, float("zero_centered_gamma" not in fields))
        )

    def ours(params, x):
        return model.apply({"params": params}, x, rngs={"dropout": jax.random.key(5)})

    def plain(params, x):
        centered = fields.get("zero_centered_gamma", False)
        hidden = (
            plain_norm(x, params["scale"], params.get("ln_bias"), kind, centered) if normed else x
        )
        y = jnp.einsum("bsh,hnf->bsnf", hidden, params["wi_kernel"])
        if "wi_lora_a_kernel" in params:
            y += (
                jnp.einsum(
                    "bsh,hnr,nrf->bsnf",
                    hidden,
                    params["wi_lora_a_kernel"],
                    params["wi_lora_b_kernel"],
                )
                / 2
            )
        y = y + params.get("wi_bias", 0)
        y = [CURVES.get(n, n)(y[..., i, :]) for i, n in enumerate(names)]
        y = y[0] * y[1] if len(y) == 2 else y[0]
        if "intermediate_dropout_rate" in fields:
            y = Dropped().apply({}, y, rngs={"dropout": jax.random.key(5)})
        out = y @ params["wo_kernel"]
        if "wo_lora_a_kernel" in params:
            out += y @ params["wo_lora_a_kernel"] @ params["wo_lora_b_kernel"] / 2
        return out + params.get("wo_bias", 0), hidden if fields.get(
            "return_layernorm_output"
        ) else None

    def objective(function):
        def value(params, x):
            y, normalized = function(params, x)
            return (y**2).mean() + (0 if normalized is None else normalized.mean())

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(params, x)

    assert_close(objective(ours), objective(plain), 1e-4)
    y, _ = jax.eval_shape(lambda x: model.apply({"params": params}, x, deterministic=True), x)
    assert y.shape == x.shape


class Dropped(nn.Module):
    """The dropout that LayerNormMLP holds, under the same name, so that it draws the same elements."""

    @nn.compact
    def __call__(self, y):
        return nn.Dropout(0.5, broadcast_dims=(-2,))(y, deterministic=False)


def test_the_kernel_of_an_mlp_is_drawn_activation_by_activation():
    x = ones((2, 8))

    def draw(key, shape, dtype):
        return jax.random.normal(key, shape, dtype)

    model = te_flax.LayerNormMLP(
        intermediate_dim=4, activations=("gelu", "linear"), enable_layernorm=False, kernel_init=draw
    )
    kernel = init_variables(model, jax.random.key(0), x)["params"]["wi_kernel"]

    class Keys(nn.Module):
        @nn.compact
        def __call__(self):
            return self.param("key", lambda key: key)

    key = Keys().init(jax.random.key(0))["params"]["key"]
    for index in range(2):
        key, init_key = jax.random.split(key)
        np.testing.assert_array_equal(kernel[:, index], draw(init_key, (8, 4), jnp.float32))


@pytest.mark.parametrize("returned", [False, True])
def test_the_norm_and_dense_module(returned):
    x = normal(jax.random.key(0), (3, 16))
    model = te_flax.LayerNormDenseGeneral(
        features=(2, 8), use_bias=True, return_layernorm_output=returned, depth_scaling=2.0
    )
    params = draw_unboxed_variables(model, x)["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "scale": (16,), "ln_bias": (16,), "kernel": (16, 2, 8), "bias": (2, 8)
    }  # fmt: skip
    y, normalized = model.apply({"params": params}, x)
    expected = plain_norm(x, params["scale"], params["ln_bias"], "layernorm")
    product = jnp.einsum("bh,hnf->bnf", expected, params["kernel"])
    np.testing.assert_allclose(y, (product + params["bias"]) / 2, rtol=1e-4, atol=1e-5)
    assert (normalized is not None) is returned
    if returned:
        np.testing.assert_allclose(normalized, expected, rtol=1e-5, atol=1e-5)


def test_checkpoint_names_reach_all_tensors_of_an_mlp():
    x = ones((32, 64))
    with te.autocast(True, recipe.MXFP8BlockScaling()):
        model = te_flax.LayerNormMLP(intermediate_dim=32, quantization_checkpoint_name="codes")
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        text = str(jax.make_jaxpr(lambda p: model.apply(p, x, deterministic=True))(params))
    assert text.count("name=codes") == 4 * 2 * 3  # four tensors, two directions, three leaves
    assert text.count("name=ffn1") == text.count("name=ffn2") == 1


def test_the_state_of_an_mlp_has_a_postfix_for_each_product():
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        model = te_flax.LayerNormMLP(intermediate_dim=32)
        variables = jax.eval_shape(model.init, jax.random.key(0), ones((4, 16)))
    names = {
        f"{t}_{i}_{leaf}"
        for t in ("x", "kernel", "grad")
        for i in (0, 1)
        for leaf in ("scale", "amax_history")
    }
    assert set(variables["fp8_metas"]) == names


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: layernorm(ones((2, 4)), ones(3), None, "rmsnorm"), r"it must be \(4,\)"),
        (lambda: layernorm(ones((2, 4)), ones(4), None, "layernorm"), "needs beta"),
        (lambda: layernorm(ones((2, 4)), ones(4), ones(4), "rmsnorm"), "beta=None"),
        (lambda: layernorm(ones((2, 4)), ones(4), None, "rmsnorm", True), "set it to False"),
        (lambda: layernorm(ones((2, 4)), ones(4), None, "batchnorm"), "choose 'layernorm'"),
        (lambda: layernorm(ones((2, 4)), ones(4), None, "rmsnorm", epsilon=-1.0), "below 0"),
        (lambda: activation(ones((2, 1, 4)), ("swish",)), "choose one of"),
        (lambda: activation(ones((2, 1, 4)), ("gelu", "linear")), "takes"),
        (lambda: activation(ones((2, 1, 4)), ("gelu",), act_params={"beta": 1}), "choose from"),
        (
            lambda: te_flax.LayerNormMLP(activations=("nosuch",)).init(
                jax.random.key(0), ones((2, 4))
            ),
            "is not an activation",
        ),
        (lambda: te_flax.LayerNormMLP(axis=0).init(jax.random.key(0), ones((2, 4))), "give -1"),
        (
            lambda: te_flax.LayerNormMLP(0).init(jax.random.key(0), ones((2, 4))),
            "intermediate_dim=0",
        ),
    ],
)
def test_a_bad_call_is_rejected_with_value_limit_and_remedy(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"])
@pytest.mark.parametrize(
    "module",
    [
        te_flax.DenseGeneral(features=64, dtype=jnp.bfloat16),
        te_flax.LayerNormMLP(
            intermediate_dim=64, activations=("silu", "linear"), use_bias=True, dtype=jnp.bfloat16
        ),
    ],
)
@pytest.mark.sampled(1)
def test_transposing_large_gradients_late_changes_no_bit(module, name, monkeypatch):
    x = normal(jax.random.key(0), (2, 32, 32), jnp.bfloat16)

    def gradients(variables, x):
        def loss(variables, x):
            y = jax.tree.leaves(module.apply(variables, x))[0]
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1), allow_int=True)(variables, x)

    result, barriers = [], []
    with te.autocast(enabled=True, recipe=getattr(recipe, name)()):
        variables = jax.jit(module.init)(jax.random.key(1), x)
        for elements in (1 << 26, 1):
            monkeypatch.setattr(products, "LATE_ELEMENTS", elements)
            jax.clear_caches()
            barriers.append(
                str(jax.make_jaxpr(gradients)(variables, x)).count("optimization_barrier")
            )
            result.append(jax.jit(gradients)(variables, x))
    assert (barriers[1] > barriers[0]) is (name != "MXFP8BlockScaling"), (
        "block scales differ between directions"
    )
    jax.tree.map(np.testing.assert_array_equal, *result)

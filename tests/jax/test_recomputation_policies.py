"""Recomputation policies that save codes: gradients and states are those without recomputation."""

from __future__ import annotations

import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal
from transformer_engine.common import recipe
from transformer_engine.jax.runtime.code_bits import bits_to_codes, codes_to_bits, name_leaves

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "block": recipe.Float8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
policies = jax.checkpoint_policies
POLICIES = {
    "names": policies.save_only_these_names("codes"),
    "all but names": policies.save_anything_except_these_names("codes"),
    "everything": policies.everything_saveable,
    "products and names": policies.save_from_both_policies(
        te.checkpoint_policies.checkpoint_dots_and_te_gemms, policies.save_only_these_names("codes")
    ),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["codes"],
        names_which_can_be_offloaded=["ffn1"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
SIZES = np.asarray([5, 0, 9], np.int32)
LAYERS = {
    "dense": lambda: te_flax.DenseGeneral(features=16, quantization_checkpoint_name="codes"),
    "norm and dense": lambda: te_flax.LayerNormDenseGeneral(
        features=16, quantization_checkpoint_name="codes"
    ),
    "mlp": lambda: te_flax.LayerNormMLP(
        intermediate_dim=32, activations=("silu", "linear"), quantization_checkpoint_name="codes"
    ),
    "experts": lambda: te_flax._MoEBlock(
        num_experts=2, intermediate_size=32, quantization_checkpoint_name="codes"
    ),
    "groups": lambda: Groups(),
    "transformer": lambda: te_flax.TransformerLayer(
        hidden_size=32,
        mlp_hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        enable_relative_embedding=False,
    ),
}


class Groups(nn.Module):
    """A grouped product with one kernel per group."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (3, 32, 16))
        grouped = te_flax.make_grouped_dense_cls(None, "codes")
        return grouped(x.reshape(-1, 32), kernel, SIZES)


def create_loss(layer: str):
    """A layer's variables and loss; the delayed-scaling state belongs to the first step."""
    x = normal(jax.random.key(0), (1, 16, 32))
    module = LAYERS[layer]()
    variables = nn.unbox(draw_variables(module, x))

    def loss(variables, x):
        y = module.apply(variables, x, rngs={"sr_rng": jax.random.key(2)})
        return jnp.sin(y[0] if isinstance(y, tuple) else y).sum()

    return loss, variables, x


def assert_equal_trees(actual, expected):
    expected = flax.traverse_util.flatten_dict(expected, sep="/")
    for name, got in flax.traverse_util.flatten_dict(actual, sep="/").items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_with_saved_codes_equal_those_without_recomputation(name):
    with te.autocast(True, RECIPES[name]):
        loss, variables, x = create_loss("dense")
        saved = jax.checkpoint(loss, policy=POLICIES["names"])
        result = jax.jit(jax.grad(saved))(variables, x)
        assert_equal_trees(result, jax.jit(jax.grad(loss))(variables, x))


@pytest.mark.parametrize(
    ("name", "layer", "policy"),
    [
        (name, layer, policy)
        for name in RECIPES
        for layer in LAYERS
        for policy in POLICIES
        if (layer, policy) != ("dense", "names")
    ],
)
@pytest.mark.sampled(3)
def test_every_policy_computes_the_gradients_without_recomputation(name, layer, policy):
    with te.autocast(True, RECIPES[name]):
        loss, variables, x = create_loss(layer)
        result = jax.jit(jax.grad(jax.checkpoint(loss, policy=POLICIES[policy])))(variables, x)
        assert_equal_trees(result, jax.jit(jax.grad(loss))(variables, x))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sampled(4)
def test_no_saved_value_has_a_dtype_whose_precision_jax_would_reduce(name, layer):
    with te.autocast(True, RECIPES[name]):
        loss, variables, x = create_loss(layer)
        for policy in POLICIES.values():
            program = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(variables, x)
            assert re.findall(r":f[48]\w*\[[\d,]*\] = reduce_precision", str(program)) == []


def test_remat_of_flax_with_a_policy_computes_the_eager_gradient():
    x = normal(jax.random.key(0), (16, 32))
    with te.autocast(True, RECIPES["current"]):
        layer = nn.remat(te_flax.DenseGeneral, policy=POLICIES["names"])
        model = layer(features=16, quantization_checkpoint_name="codes")
        variables = nn.unbox(draw_variables(model, x))
        plain = te_flax.DenseGeneral(features=16)
        actual = jax.grad(lambda v: jnp.sin(model.apply(v, x)).sum())(variables)
        expected = jax.jit(jax.grad(lambda v: jnp.sin(plain.apply(v, x)).sum()))(variables)
        assert_equal_trees(actual, expected)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float4_e2m1fn, jnp.bfloat16],
)
def test_named_codes_keep_every_bit_under_a_policy(dtype):
    bits = jnp.finfo(dtype).bits
    words = np.arange(2 ** min(bits, 8)).astype({16: np.uint16, 8: np.uint8, 4: jnp.uint4}[bits])
    codes = jax.lax.bitcast_convert_type(jnp.asarray(words), dtype)
    program = jax.make_jaxpr(lambda codes: name_leaves((codes, None), "codes"))(codes)
    assert str(program).count("name=codes") == 1
    for result in (
        name_leaves(codes, "codes"),
        name_leaves(codes, None),
        bits_to_codes(codes_to_bits(codes)),
    ):
        assert result.dtype == dtype
        np.testing.assert_array_equal(jax.lax.bitcast_convert_type(result, words.dtype), words)
    if bits <= 8:
        assert jnp.issubdtype(codes_to_bits(codes).bits.dtype, jnp.unsignedinteger)
    else:
        assert codes_to_bits(codes) is codes


def test_jax_reduces_the_precision_of_saved_codes_that_are_not_integers():
    """The reason for code_bits; once JAX keeps saved float8 values, the module can go."""
    x = jnp.asarray([448.0, 2.0**-9], jnp.float32)

    def loss(x):
        codes = checkpoint_name(x.astype(jnp.float8_e4m3fn), "codes")
        return (jax.lax.stop_gradient(codes.astype(jnp.float32)) * x).sum()

    result = jax.jit(jax.grad(jax.checkpoint(loss, policy=POLICIES["names"])))(x)
    assert not np.array_equal(result, x)

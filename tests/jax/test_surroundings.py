"""Layers with jit disabled, arrays that a trace closes over, Explicit axes, and masks that are not read."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, normal, ones, zeros
from transformer_engine.common import recipe
from transformer_engine.jax import sharding
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.primitives.attention import masks


def test_grouped_products_and_gradients_work_with_jit_disabled():
    x = normal(jax.random.key(0), (6, 4))
    kernel = normal(jax.random.key(1), (2, 4, 3))

    def loss(x, kernel):
        return (grouped_dense(x, kernel, array([2, 4])) ** 2).sum()

    compiled = jax.grad(loss, argnums=(0, 1))(x, kernel)
    with jax.disable_jit():
        result = jax.grad(loss, argnums=(0, 1))(x, kernel)
    for one, other in zip(result, compiled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    "trace", [jax.jit, lambda f: lambda: jax.eval_shape(f)], ids=["jit", "eval_shape"]
)
def test_a_constraint_applies_to_an_array_that_a_trace_closes_over(trace):
    x, mesh = ones((4, 8)), Mesh(np.asarray(jax.devices()[:1]), ("dp",))
    with jax.set_mesh(mesh):
        laid = trace(lambda: sharding.with_sharding_constraint(x, PartitionSpec("dp")))()
    assert laid.shape == x.shape and laid.dtype == x.dtype


def test_init_of_a_sequence_parallel_layer_closes_over_its_inputs():
    layer = te_flax.TransformerLayer(
        hidden_size=16, mlp_hidden_size=16, num_attention_heads=2, enable_sequence_parallel=True
    )
    x, mesh = ones((2, 4, 16)), Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    resource = te.MeshResource(dp_resource="dp", tp_resource="tp")
    alone = jax.eval_shape(lambda key: layer.init(key, x, deterministic=True), jax.random.key(0))
    with jax.set_mesh(mesh), te.autocast(enabled=False, mesh_resource=resource):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            result = jax.jit(lambda key: layer.init(key, x, deterministic=True))(jax.random.key(0))
    assert jax.tree.map(jnp.shape, nn.meta.unbox(result)) == jax.tree.map(
        jnp.shape, nn.meta.unbox(alone)
    )


@pytest.mark.parametrize(
    "kind, other",
    [
        ("no_mask", "padding"),
        ("causal", "padding_causal"),
        ("causal_bottom_right", "padding_causal_bottom_right"),
    ],
)
def test_a_mask_that_the_type_does_not_read_is_warned_of_once(kind, other):
    q, k, v = ones((3, 1, 4, 2, 8))
    hidden = zeros((1, 1, 4, 4), bool)
    masks._warn_of_mask.cache_clear()
    with pytest.warns(UserWarning, match=f"'{kind}', which does not read it.*give '{other}'"):
        te_flax.DotProductAttention(8, 2, attn_mask_type=kind).apply(
            {}, q, k, v, hidden, deterministic=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        te_flax.DotProductAttention(8, 2, attn_mask_type=kind).apply(
            {}, q, k, v, hidden, deterministic=True
        )
        te_flax.DotProductAttention(8, 2, attn_mask_type=other).apply(
            {}, q, k, v, hidden, deterministic=True
        )


@pytest.mark.parametrize(
    "layer", [te_flax.DenseGeneral(8), te_flax.LayerNormDenseGeneral(8), te_flax.LayerNormMLP(8)]
)
def test_inputs_without_elements_to_sum_over_are_rejected(layer):
    with pytest.raises(ValueError, match=r"would have shape \(0.*give inputs whose last axis"):
        layer.init(jax.random.key(0), ones((4, 0)))


def test_rows_that_do_not_fill_a_transforms_group_name_the_recipes_switch():
    layer, x = te_flax.DenseGeneral(features=32), ones((2, 32))
    rngs = {"params": jax.random.key(0), "sr_rng": jax.random.key(1)}
    with (
        te.autocast(enabled=True, recipe=recipe.NVFP4BlockScaling()),
        pytest.raises(ValueError, match=r"M=2 is not a multiple of 16.*disable_rht=True"),
    ):
        layer.init(rngs, x)

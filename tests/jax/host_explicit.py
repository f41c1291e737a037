"""Gradients over Explicit mesh axes, and eager ones over a mesh, on eight host devices, as JSON {case: difference}."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, start_on_host_devices
from transformer_engine.common import recipe
from transformer_engine.jax import sharding
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.permutation import sort_chunks_by_index, token_combine, token_dispatch
from transformer_engine.jax.router import fused_topk_with_score_function

RESOURCE = te.MeshResource(dp_resource="dp", tp_resource="tp")
SIZES = np.asarray([3, 0, 13], np.int32)
LAYERS = {
    "dense": lambda: te_flax.DenseGeneral(features=16, input_axes=("nvte_batch", None, None)),
    "norm": te_flax.LayerNorm,
    "norm and dense": lambda: te_flax.LayerNormDenseGeneral(
        features=16, return_layernorm_output=True
    ),
    "mlp": lambda: te_flax.LayerNormMLP(intermediate_dim=32),
    "gated mlp": lambda: te_flax.LayerNormMLP(intermediate_dim=32, activations=("silu", "linear")),
    "transformer": lambda: te_flax.TransformerLayer(
        hidden_size=32,
        mlp_hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        intermediate_dropout=0.0,
        enable_relative_embedding=False,
    ),
    "experts": lambda: te_flax._MoEBlock(num_experts=4, intermediate_size=32, aux_loss_coeff=0.1),
    "rotary transformer": lambda: te_flax.TransformerLayer(
        hidden_size=32,
        mlp_hidden_size=32,
        num_attention_heads=4,
        num_gqa_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        enable_rotary_pos_emb=True,
        mlp_activations=("silu", "linear"),
        layernorm_type="rmsnorm",
        use_bias=True,
        fuse_qkv_params=False,
    ),
}
RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
CASES = [
    *((layer, "none") for layer in LAYERS),
    *((layer, name) for layer in ("dense", "mlp") for name in RECIPES if name != "none"),
]

# The fastest cases, which always run.
ALWAYS = {
    "Explicit, norm and dense, none",
    "eager, dense",
    "Explicit, groups",
    "Explicit, permutation",
    "mixed axes",
}


def difference(actual, expected) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(b)).max() + 1e-30))
        for a, b in pairs
    )


def layer_loss(layer):
    module = LAYERS[layer]()

    def loss(variables, x):
        y = module.apply(variables, x)
        return sum(jnp.sin(one).sum() for one in jax.tree.leaves(y))

    return module, loss


def create_mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(kind, kind))


def gradients(kind: AxisType, layer: str, name: str, jitted: bool, rules: bool = False) -> float:
    x = normal(jax.random.key(0), (4, 8, 32))
    module, loss = layer_loss(layer)
    with te.autocast(RECIPES[name] is not None, RECIPES[name]):
        variables = nn.unbox(draw_variables(module, x))
        expected = jax.jit(jax.grad(loss, (0, 1)))(variables, x)
    mesh = create_mesh(kind)
    with jax.set_mesh(mesh), te.autocast(RECIPES[name] is not None, RECIPES[name], RESOURCE):
        places = te_flax.extend_logical_axis_rules(()) if rules else ()
        with nn.logical_axis_rules(places):
            if jitted:
                x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
            gradient = jax.grad(loss, (0, 1))
            actual = (jax.jit(gradient) if jitted else gradient)(variables, x)
    return difference(actual, expected)


def grouped(kind: AxisType) -> float:
    x, kernel = normal(jax.random.key(0), (16, 32)), normal(jax.random.key(1), (3, 32, 16))

    def loss(x, kernel):
        return jnp.sin(grouped_dense(x, kernel, SIZES)).sum()

    expected = jax.jit(jax.grad(loss, (0, 1)))(x, kernel)
    mesh = create_mesh(kind)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
        kernel = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(None, None, "tp")))
        return difference(jax.jit(jax.grad(loss, (0, 1)))(x, kernel), expected)


def permutation() -> float:
    """Tokens in the order of their experts and back, and chunks in another order."""
    x, logits = normal(jax.random.key(0), (16, 8)), normal(jax.random.key(1), (16, 4))

    def loss(x, logits):
        weights, chosen = fused_topk_with_score_function(logits, 2)
        rows, _, row_id_map, pads, _ = token_dispatch(x, chosen, 32, weights, 16)
        rows = rows * jnp.arange(rows.shape[0])[:, None]  # otherwise the gradient of logits is 0
        chunks, _ = sort_chunks_by_index(x, jnp.asarray([4, 8, 4]), jnp.asarray([2, 0, 1]))
        return jnp.sin(token_combine(rows, row_id_map, weights, pads) + chunks).sum()

    expected = jax.jit(jax.grad(loss, (0, 1)))(x, logits)
    mesh = create_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("dp"))
        actual = jax.jit(jax.grad(loss, (0, 1)))(
            jax.device_put(x, rows), jax.device_put(logits, rows)
        )
    return difference(actual, expected)


def constrain_mixed_axes() -> float:
    """A constraint over an Explicit and an Auto axis."""
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(jax.random.key(0), (8, 4)), NamedSharding(mesh, PartitionSpec()))
        y = jax.jit(lambda x: sharding.with_sharding_constraint(2 * x, PartitionSpec("dp", "tp")))(
            x
        )
        return difference(y, 2 * x) + (y.sharding.spec != PartitionSpec("dp", "tp"))


def keys(impl: str, ep_axis: str | None) -> float:
    """Experts over devices with a key from any implementation; 1e-5 for a relative error of 0.4.

    Stochastic rounding to NVFP4 in three products differs by less.
    """
    x = normal(jax.random.key(0), (4, 8, 32))
    module = te_flax._MoEBlock(num_experts=4, intermediate_size=32, ep_axis=ep_axis)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("ep",))
    streams = {"params": jax.random.key(0), "sr_rng": jax.random.key(1, impl=impl)}
    resource = te.MeshResource(ep_resource="ep")
    with jax.set_mesh(mesh), te.autocast(True, recipe.NVFP4BlockScaling(), resource):
        y = jax.jit(lambda: module.init_with_output(streams, x)[0][0])()
    with te.autocast(False):
        alone = te_flax._MoEBlock(num_experts=4, intermediate_size=32)
        expected = jax.jit(lambda: alone.init_with_output(streams, x)[0][0])()
    return float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)) * 1e-5 / 0.4


def cases() -> dict[str, Callable[[], float]]:
    """Every case by its name."""
    layers = {
        f"Explicit, {layer}, {name}": partial(gradients, AxisType.Explicit, layer, name, True)
        for layer, name in CASES
    }
    eager = {
        f"eager, {layer}": partial(gradients, AxisType.Auto, layer, "none", False)
        for layer in ("dense", "mlp", "transformer")
    }
    return {
        **layers,
        **eager,
        "Explicit, rules, mlp": partial(
            gradients, AxisType.Explicit, "mlp", "none", True, rules=True
        ),
        "Auto, rules, mlp": partial(gradients, AxisType.Auto, "mlp", "none", True, rules=True),
        "Auto, mlp without rules": partial(gradients, AxisType.Auto, "mlp", "none", True),
        "eager, rules, mlp": partial(gradients, AxisType.Auto, "mlp", "none", False, rules=True),
        "Explicit, groups": partial(grouped, AxisType.Explicit),
        "Explicit, permutation": permutation,
        "mixed axes": constrain_mixed_axes,
        **{f"keys, {impl}": partial(keys, impl, "ep") for impl in ("threefry2x32", "rbg")},
    }


def main() -> None:
    """Run the cases of ALWAYS, or with --rest the others."""
    start_on_host_devices()
    warnings.simplefilter("ignore")
    rest = "--rest" in sys.argv
    print(
        json.dumps({name: case() for name, case in cases().items() if (name in ALWAYS) is not rest})
    )


if __name__ == "__main__":
    main()

"""Mixtures of experts over eight host devices against one: printed as JSON, {case: greatest relative differences}."""

from __future__ import annotations

import json
import sys
from functools import cache

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, ones, start_on_host_devices
from tests.jax.host_compositions import create_mesh
from tests.jax.host_devices import difference
from transformer_engine.common import recipe
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.quantize import GroupedQuantizer, QuantizerFactory
from transformer_engine.jax.quantize.grouped import groups_advanced_together

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
FIELDS = {
    "num_experts": 8,
    "intermediate_size": 64,
    "aux_loss_coeff": 0.1,
    "score_function": "sigmoid",
}
EXPERTS, WIDTH = 8, 32


def tokens_in_whole_blocks() -> jax.Array:
    """x [8, 16, 32]: in each batch half 16 tokens go to every expert (by `gates`), and one row is large."""
    t = np.arange(128)
    chosen = np.zeros((128, EXPERTS), np.float32)
    chosen[t, t % 8] = chosen[t, (t % 8 + 1 + t // 8 % 7) % 8] = 8.0
    x = np.array(normal(jax.random.key(0), (8, 16, WIDTH)))
    x[0, :, EXPERTS:] *= 6.0
    x[..., :EXPERTS] += chosen.reshape(8, 16, EXPERTS)
    return jnp.asarray(x)


def gates() -> jax.Array:
    """gate_kernel [32, 8], by which the first features of a token choose its experts."""
    return jnp.eye(WIDTH, EXPERTS) + 0.01 * normal(jax.random.key(3), (WIDTH, EXPERTS))


def step(model, variables, x):
    """((loss, (y, rows that devices received)), parameter gradients, next state and gradient of x)."""
    state, params = flax.core.pop(variables, "params")

    def loss(params, state, x):
        y, balance, received = model.apply(
            {"params": params, **state}, x, rngs={"sr_rng": jax.random.key(4)}
        )
        return (y.astype(jnp.float32) ** 2).mean() + balance, (y, received)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(params, state, x)


def start(settings, x, **fields):
    """Return a model on one device and its variables; biases are near 3."""
    model = te_flax._MoEBlock(**FIELDS | fields)
    with te.autocast(settings is not None, settings):
        variables = nn.meta.unbox(draw_variables(model, x))
    params = {n: p + 3.0 if n.endswith("_bias") else p for n, p in variables["params"].items()}
    return model, variables | {"params": params}


def experts_case(
    mesh: Mesh,
    data_axes: tuple[str, ...],
    settings,
    x=None,
    routed=False,
    cut=(),
    entered=jax.set_mesh,
    **fields,
) -> dict[str, float]:
    """Output, gradients, state and received rows per device of a _MoEBlock with experts over "ep".

    routed   by `gates`
    cut      axes that shard the parameters: {name: spec}
    """
    x = normal(jax.random.key(0), (8, 8, WIDTH)) if x is None else x
    one, variables = start(settings, x, **fields)
    many = te_flax._MoEBlock(**FIELDS | fields, ep_axis="ep", data_parallelism_axes=data_axes)
    if routed:
        variables["params"]["gate_kernel"] = gates()
    with te.autocast(settings is not None, settings):
        (_, (y, _)), (params, state, dx) = step(one, variables, x)
    laid = dict(variables["params"])
    for name, spec in dict(cut).items():
        laid[name] = jax.device_put(laid[name], NamedSharding(mesh, PartitionSpec(*spec)))
    with entered(mesh), te.autocast(settings is not None, settings):
        (_, (got_y, received)), got = step(many, variables | {"params": laid}, x)
    results = {
        "y": difference(got_y, y),
        "gradients": difference(got[0], params),
        "dx": difference(got[2], dx),
        "state": difference(*forward_and_backward_states(got[1], state)[0]),
        "state of gradients": difference(*forward_and_backward_states(got[1], state)[1]),
    }
    slots = 2 * x.shape[0] * x.shape[1]
    return results | {
        "difference": max(results.values()),
        "received": int(received.sum()),
        "slots": slots,
    }


def forward_and_backward_states(*collections) -> list[list[dict[str, jax.Array]]]:
    """[input and kernel states, gradient states], each with one dictionary per collection."""
    states = [collection.get("fp8_metas", {}) for collection in collections]
    return [
        [
            {name: leaf for name, leaf in one.items() if ("grad" in name) == backward}
            for one in states
        ]
        for backward in (False, True)
    ]


@cache
def rows_of_devices() -> tuple[jax.Array, jax.Array]:
    """Rows [dp, ep, group, 128, 64], whose maxima all differ, and the same as one tensor [512 * 2, 64]."""
    x = normal(jax.random.key(5), (2, 2, 2, 128, 64))
    x = x * (1.0 + jnp.arange(8.0).reshape(2, 2, 2, 1, 1))
    return x, jnp.moveaxis(x, 0, 2).reshape(-1, 64)


def codes_case(name: str, member: str) -> dict[str, int]:
    """Count differing codes, decoded values and next states against one tensor with four groups."""
    parts, full = rows_of_devices()
    with te.autocast(True, RECIPES[name]):
        quantizer = getattr(QuantizerFactory.create_set(n_groups=4), member)
    # scales, not histories
    quantizer = jax.tree.map(lambda leaf: leaf * 3.7 if leaf.ndim == 1 else leaf, quantizer)
    mesh_axes = ("dp",)

    def encode(quantizer, x, sizes, mesh_axes):
        tensor, amax = quantizer.encode(x, sizes, mesh_axes=mesh_axes)
        directions = tensor.rowwise_tensor, tensor.colwise_tensor
        values = directions[0].data.astype(jnp.float32), *(one.dequantize() for one in directions)
        return values, groups_advanced_together((quantizer,), (amax,), mesh_axes)[0].quantizer

    def local(quantizer, x):
        separate = GroupedQuantizer(quantizer.quantizer, 2)
        values, following = encode(
            separate, x.reshape(-1, 64), jnp.full(2, 128, jnp.int32), mesh_axes
        )
        return [value.reshape(x.shape) for value in values], following

    with te.autocast(True, RECIPES[name]):
        expected = jax.jit(lambda q, x: encode(q, x, jnp.full(4, 256, jnp.int32), ()))(
            quantizer, full
        )
    of_experts, of_rows = PartitionSpec("ep"), PartitionSpec("dp", "ep")
    mapped = jax.shard_map(
        local,
        mesh=create_mesh(dp=2, ep=2),
        in_specs=(of_experts, of_rows),
        out_specs=(of_rows, of_experts),
        check_vma=False,
    )
    values, following = jax.jit(mapped)(quantizer, parts)
    values = [jnp.moveaxis(value, 0, 2).reshape(-1, 64) for value in values]
    pairs = zip(jax.tree.leaves((values, following)), jax.tree.leaves(expected), strict=True)
    return {"unequal": sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in pairs)}


def random_case() -> dict[str, float]:
    """Gradient difference between two equal batch halves, whose devices round stochastically."""
    settings = recipe.NVFP4BlockScaling(disable_rht=True)
    half = normal(jax.random.key(0), (2, 16, WIDTH))
    x = jnp.concatenate((half, half))
    _, variables = start(settings, x)
    model = te_flax._MoEBlock(**FIELDS, ep_axis="ep", data_parallelism_axes=("dp",))
    mesh = create_mesh(dp=2, ep=2)
    with jax.set_mesh(mesh), te.autocast(True, settings):
        (_, (y, _)), (_, _, dx) = step(model, variables, x)
    return {"y": difference(y[2:], y[:2]), "dx": difference(dx[2:], dx[:2])}


def cuda_calls(settings) -> dict[str, int]:
    """Calls in the CUDA program of a bfloat16 step on a mesh with one additional axis."""
    x = ones((8, 16, WIDTH), jnp.bfloat16)
    _, variables = start(settings, x, dtype=jnp.bfloat16)
    model = te_flax._MoEBlock(
        **FIELDS, dtype=jnp.bfloat16, ep_axis="ep", data_parallelism_axes=("dp",)
    )
    with jax.set_mesh(create_mesh(dp=2, ep=2, tp=2)), te.autocast(settings is not None, settings):
        traced = jax.jit(lambda variables, x: step(model, variables, x)).trace(variables, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {
        name: text.count(f"@{name}(") for name in ("CustomSPMDPartitioning", "ragged_all_to_all")
    }


# The codes that are compared without --all.
SHORT = (("delayed", "dgrad"), ("current", "x"), ("nvfp4", "x"))


def main() -> None:
    everything = "--all" in sys.argv
    start_on_host_devices()
    x = tokens_in_whole_blocks()
    mesh = create_mesh(dp=2, ep=4)
    results = {}
    for name, settings in RECIPES.items():
        if everything:
            results[f"dp and ep: {name}"] = experts_case(mesh, ("dp",), settings, x, True)
            results[f"ep 2: {name}"] = experts_case(create_mesh(ep=2), (), settings)
            results[f"ep 4: {name}"] = experts_case(create_mesh(ep=4), (), settings)
            early = experts_case(mesh, ("dp",), settings, x, True, apply_topk_weights_early=True)
            results[f"early: {name}"] = early
    results["few tokens: delayed"] = experts_case(
        create_mesh(dp=2, ep=2, tp=2),
        ("dp",),
        RECIPES["delayed"],
        normal(jax.random.key(0), (4, 2, WIDTH)),
        entered=lambda mesh: mesh,
        cut={"wi": ("ep", None, "tp"), "wo": ("ep", "tp")},
    )
    if everything:
        results["halves: current"] = experts_case(
            mesh,
            ("dp",),
            RECIPES["current"],
            x.astype(jnp.bfloat16),
            True,
            dtype=jnp.bfloat16,
            use_ffn_bias=True,
        )
    for name, settings in RECIPES.items():
        for member in ("x", "dgrad"):
            if settings is not None and (everything or (name, member) in SHORT):
                results[f"codes: {name} {member}"] = codes_case(name, member)
    if everything:
        results["random"] = random_case()
    if launching.kernels_unsupported_reason() is None:
        results["lowered"] = cuda_calls(RECIPES["current"])
    print(json.dumps(results))


if __name__ == "__main__":
    main()

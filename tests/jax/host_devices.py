"""Layers on eight host devices against one: printed as JSON, {case: greatest relative difference}."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, start_on_host_devices
from transformer_engine.common import recipe
from transformer_engine.jax import sharding

RECIPE = recipe.DelayedScaling(amax_history_len=4)
RESOURCE = te.MeshResource(dp_resource="dp", tp_resource="tp")


def step(model, x, params, state):
    def loss(params, state):
        return (model.apply({"params": params, **state}, x) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(params, state)


def difference(got, expected) -> float:
    """Largest difference of all leaves, relative to each leaf's largest element. NaN is kept, which max() may drop."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    each = [
        np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(b)).max() + 1e-30)
        for a, b in pairs
    ]
    return float(np.max(each, initial=0.0))


class Block(nn.Module):
    """Two products; the first kernel is sharded by columns and the second by rows."""

    @nn.compact
    def __call__(self, x):
        axes = (sharding.BATCH_AXES, sharding.HIDDEN_AXES)
        hidden = te_flax.DenseGeneral(
            64,
            kernel_axes=(sharding.W_FSDP_AXES, sharding.W_TP_AXES),
            bias_axes=(sharding.W_TP_AXES,),
            input_axes=axes,
        )(x)
        return te_flax.DenseGeneral(
            32,
            kernel_axes=(sharding.W_TP_AXES, sharding.W_FSDP_AXES),
            input_axes=(sharding.BATCH_AXES, sharding.HIDDEN_TP_AXES),
            use_bias=False,
        )(nn.gelu(hidden))


def shards(params) -> int:
    """Number of shards of the first kernel."""
    kernel = params["DenseGeneral_0"]["kernel"]
    return kernel.size // kernel.addressable_shards[0].data.size


def restore_checkpoint(mesh: Mesh, tree, placed):
    """Save a tree of one device with orbax and restore it: parameters sharded like `placed`, the rest replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    laid = {
        "params": jax.tree.map(lambda leaf: leaf.sharding, placed),
        "state": jax.tree.map(lambda leaf: everywhere, tree["state"]),
    }
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        laid,
    )
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "run", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "run", shapes)


def collective_results(mesh: Mesh) -> dict[str, list[float]]:
    """First results from te.sharding's collectives on the numbers 0 to 7, one per device in a 4 x 2 mesh."""

    def body(x):
        return jnp.concatenate(
            [
                sharding.all_reduce_max_along_all_axes_except_PP(x),
                sharding.all_reduce_sum_along_dp_fsdp(x),
                sharding.all_reduce_sum_along_dp_fsdp_tpsp(x),
            ]
        )

    results = {}
    for name, resource in (
        ("dp and tpsp", te.MeshResource(dp_resource="dp", tpsp_resource="tp")),
        ("pp and fsdp", te.MeshResource(pp_resource="dp", fsdp_resource="tp")),
    ):
        with jax.set_mesh(mesh), sharding.global_shard_guard(resource):
            mapped = jax.shard_map(
                body, in_specs=PartitionSpec(("dp", "tp")), out_specs=PartitionSpec(("dp", "tp"))
            )
            results[name] = np.asarray(jax.jit(mapped)(jnp.arange(8.0)))[:3].tolist()
    return results


def shared_in_shard_map(mesh: Mesh) -> dict[str, float]:
    """Gradients and next states of replicated arrays inside a shard_map that tracks varying axes."""
    x = normal(jax.random.key(2), (64, 32))
    results = {}
    for name, model in (
        ("dense", te_flax.DenseGeneral(features=16)),
        ("norm", te_flax.LayerNorm(layernorm_type="rmsnorm")),
        ("norm and dense", te_flax.LayerNormDenseGeneral(features=16)),
    ):

        def loss(variables, x, model=model):
            outputs = model.apply(variables, x)
            return (jax.tree.leaves(outputs)[0] ** 2).mean()

        variables = nn.meta.unbox(draw_variables(model, x))
        rows = PartitionSpec(("dp", "tp"))
        mapped = jax.shard_map(
            lambda v, x, loss=loss: jax.grad(lambda v: jax.lax.pmean(loss(v, x), ("dp", "tp")))(v),
            mesh=mesh,
            in_specs=(PartitionSpec(), rows),
            out_specs=PartitionSpec(),
        )
        results[name] = difference(
            jax.jit(mapped)(variables, x), jax.jit(jax.grad(loss))(variables, x)
        )
    return results


def main() -> None:
    start_on_host_devices()
    x = normal(jax.random.key(0), (64, 32))
    model = Block()
    with te.autocast(True, RECIPE):
        boxed = draw_variables(model, x)
        state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
        expected = jax.jit(lambda *a: step(model, x, *a))(params, state)
    devices = np.asarray(jax.devices()).reshape(4, 2)
    kinds = (AxisType.Auto,) * 2
    mesh = Mesh(devices, ("dp", "tp"), axis_types=kinds)
    results: dict[str, Any] = {"reduced": collective_results(mesh)}
    with te.autocast(True, RECIPE):
        results["shard_map"] = shared_in_shard_map(mesh)
    for name, entered in (("with mesh", lambda: mesh), ("set_mesh", lambda: jax.set_mesh(mesh))):
        with entered(), te.autocast(True, RECIPE, mesh_resource=RESOURCE):
            rules = te_flax.extend_logical_axis_rules(())
            with nn.logical_axis_rules(rules):
                specs = nn.logical_to_mesh(nn.get_partition_spec(boxed)["params"])
                placed = jax.tree.map(
                    lambda p, s: jax.device_put(p, NamedSharding(mesh, s)),
                    params,
                    specs,
                    is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
                )
                x_placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
                everywhere = NamedSharding(mesh, PartitionSpec())
                copies = jax.device_put(state, everywhere)
                run = (
                    jax.jit(lambda x, *a: step(model, x, *a))
                    .lower(x_placed, placed, copies)
                    .compile()
                )
                text = run.as_text() or ""
                got = run(x_placed, placed, copies)
                if name == "set_mesh":
                    saved = restore_checkpoint(mesh, {"params": params, "state": state}, placed)
                    repeated = run(x_placed, saved["params"], saved["state"])
                    results["restored"] = difference(repeated, got)
                    results["restored shards"] = shards(saved["params"])
        results[name] = difference(got[0], expected[0])
        results[f"{name} gradients"] = difference(got[1][0], expected[1][0])
        results[f"{name} state"] = difference(got[1][1]["fp8_metas"], expected[1][1]["fp8_metas"])
        results[f"{name} shards"] = shards(placed)
        results[f"{name} all-gathers"] = text.count("all-gather(")
    with te.autocast(True, RECIPE):  # its arguments are sharded over devices, and no mesh is active
        got = jax.jit(lambda x, *a: step(model, x, *a))(x_placed, placed, state)
    results["no mesh"] = difference(got[0], expected[0])
    results["no mesh gradients"] = difference(got[1][0], expected[1][0])
    results["no mesh state"] = difference(got[1][1]["fp8_metas"], expected[1][1]["fp8_metas"])
    results["no mesh shards"] = shards(got[1][0])
    print(json.dumps(results))


if __name__ == "__main__":
    main()

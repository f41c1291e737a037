"""Functions on eight host devices, in meshes and ways to enter them, against one: {case: difference} as JSON."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import normal, start_on_host_devices
from tests.jax.host_compositions import create_mesh
from tests.jax.host_devices import difference
from transformer_engine.common import recipe
from transformer_engine.jax import attention, permutation, router, sharding
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import QuantizerFactory

EXPERTS, CHOSEN = 8, 2
DELAYED = recipe.DelayedScaling(amax_history_len=4)
# {mesh: (its axes, their resources, row axis, column axis)}
MESHES = {
    "dp 8": ({"dp": 8}, {"dp_resource": "dp"}, "dp", None),
    "dp 4, tp 2": ({"dp": 4, "tp": 2}, {"dp_resource": "dp", "tp_resource": "tp"}, "dp", "tp"),
    "fsdp 4, tpsp 2": (
        {"fsdp": 4, "tpsp": 2},
        {"fsdp_resource": "fsdp", "tpsp_resource": "tpsp"},
        "fsdp",
        "tpsp",
    ),
    "fsdp 8": ({"fsdp": 8}, {"fsdp_resource": "fsdp"}, "fsdp", None),
    "dp 2, tpsp 4": (
        {"dp": 2, "tpsp": 4},
        {"dp_resource": "dp", "tpsp_resource": "tpsp"},
        "dp",
        "tpsp",
    ),
}
FEW = [
    ("balance", "dp 8", "with mesh"),
    ("permutation", "dp 4, tp 2", "with mesh"),
    ("attention", "dp 2, tpsp 4", "set_mesh"),
    ("mlp", "dp 4, tp 2", "with mesh"),
    ("dense in mxfp8", "fsdp 8", "set_mesh"),
    ("dense in nvfp4", "fsdp 4, tpsp 2", "set_mesh"),
    ("dense in block", "dp 4, tp 2", "with mesh"),
    ("router", "dp 8", "shard_map"),
    ("permutation", "dp 8", "shard_map"),
]


def random(seed: int, *shape: int):
    return normal(jax.random.key(seed), shape)


@dataclass(frozen=True)
class Case:
    """A loss on arrays with rows, loss(*arrays).

    Attributes:
        cut: For each array the axes that shard it: "rows", "columns" or None per dimension.
        by_rows: The loss is the mean of the devices' losses on their rows, so shard_map can compute it.
    """

    loss: Callable[..., jax.Array]
    arrays: tuple[Any, ...]
    cut: tuple[tuple[str | None, ...], ...]
    by_rows: bool = True

    def specs(self, rows: str, columns: str | None) -> tuple[PartitionSpec, ...]:
        axes = {"rows": rows, "columns": columns, None: None}
        return tuple(PartitionSpec(*(axes[name] for name in cut)) for cut in self.cut)

    def step(self, mapped: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Loss and gradients for all arrays; a state's gradient is the next state."""
        loss = self.loss if mapped is None else mapped
        return jax.value_and_grad(loss, argnums=tuple(range(len(self.arrays))))


def dense(x, kernel, quantizers):
    y = te.dense.dense(
        x,
        kernel,
        quantizer_set=quantizers,
        input_axes=(sharding.BATCH_AXES, sharding.HIDDEN_AXES),
        kernel_axes=(sharding.W_FSDP_AXES, sharding.W_TP_AXES),
    )
    return (y**2).mean()


def mlp(x, gamma, wi, wo, quantizers):
    tokens = (sharding.BATCH_AXES, sharding.SEQLEN_AXES)
    y = layernorm_mlp(
        x,
        gamma,
        None,
        (wi, wo),
        (None, None),
        "rmsnorm",
        activation_type=("silu", "linear"),
        quantizer_sets=quantizers,
        dot_1_input_axes=(*tokens, sharding.HIDDEN_AXES),
        dot_2_input_axes=(*tokens, sharding.HIDDEN_TP_AXES),
        kernel_1_axes=(sharding.W_FSDP_AXES, sharding.W_JOINED_AXES, sharding.W_TP_AXES),
        kernel_2_axes=(sharding.W_TP_AXES, sharding.W_FSDP_AXES),
    )
    return (y**2).mean()


def attend(q, k, v, bias):
    lengths = jnp.full(q.shape[0], q.shape[1] - 3, jnp.int32)
    out = attention.fused_attn(
        (q, k, v),
        bias,
        attention.SequenceDescriptor.from_seqlens(lengths),
        None,
        attention.AttnBiasType.POST_SCALE_BIAS,
        attention.AttnMaskType.PADDING_CAUSAL_MASK,
        attention.QKVLayout.BSHD_BSHD_BSHD,
        attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        0.3,
        dropout_probability=0.0,
        is_training=True,
    )
    return (out**2).mean()


def route(logits):
    probs, _ = router.fused_topk_with_score_function(logits, CHOSEN, score_function="sigmoid")
    return (probs * jnp.cos(jnp.arange(EXPERTS))).sum(axis=1).mean()


def balance(logits):
    """Of sums over all tokens a product."""
    _, chosen = router.fused_topk_with_score_function(logits, CHOSEN)
    scores, _ = router.fused_topk_with_score_function(logits, CHOSEN, compute_aux_scores=True)
    return router.fused_moe_aux_loss(scores, chosen.sum(axis=0), CHOSEN, 0.1)


def permute(x, weights):
    tokens = x.shape[0]
    _, chosen = router.fused_topk_with_score_function(jax.lax.stop_gradient(weights), CHOSEN)
    rows, of_rows, goes_to, pads, counts = permutation.token_dispatch(
        x, chosen, CHOSEN * tokens, probs=weights, align_size=4
    )
    assert of_rows is not None
    result = (
        rows
        * of_rows[:, None]
        * jnp.repeat(jnp.arange(1.0, EXPERTS + 1), counts, total_repeat_length=len(rows))[:, None]
    )
    return (permutation.token_combine(result, goes_to, pad_offsets=pads) ** 2).mean()


def states(count: int, settings: Any = DELAYED) -> tuple[Any, ...]:
    with te.autocast(True, settings):
        result: Any = QuantizerFactory.create_set(n_quantizer_sets=count)
    return result if count > 1 else (result,)


WHOLE = (None,)


def block_sharded_dense(settings: Any) -> Case:
    """A dense layer whose kernel is sharded along both axes; the axis of the rows shards the contracted one."""
    arrays = (random(0, 64, 64), random(1, 64, 32), *states(1, settings))
    return Case(dense, arrays, (("rows",), ("rows", "columns"), WHOLE), by_rows=False)


def cases() -> dict[str, Case]:
    """Return the cases and their names. Their arrays are computed here, after `start_on_host_devices`."""
    return {
        "dense": Case(dense, (random(0, 64, 32), random(1, 32, 16), *states(1)), (("rows",), (None, "columns"), WHOLE)),
        # Each device holds 32, 16 or 128 of the 64 contracted elements, and shares a block with other devices.
        "dense in mxfp8": block_sharded_dense(recipe.MXFP8BlockScaling()),
        "dense in nvfp4": block_sharded_dense(recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)),
        "dense in block": block_sharded_dense(recipe.Float8BlockScaling()),
        "mlp": Case(
            mlp,
            (random(0, 8, 16, 32), 1 + 0.1 * random(1, 32), random(2, 32, 2, 64) / 6, random(3, 64, 32) / 8,
             states(2)),
            (("rows",), WHOLE, (None, None, "columns"), ("columns",), WHOLE),
        ),
        "attention": Case(
            attend,
            (random(0, 8, 16, 8, 8), random(1, 8, 16, 4, 8), random(2, 8, 16, 4, 8), random(3, 1, 8, 16, 16)),
            (("rows", None, "columns"),) * 3 + ((None, "columns"),),
        ),
        "router": Case(route, (random(0, 64, EXPERTS),), (("rows",),)),
        "balance": Case(balance, (random(0, 64, EXPERTS),), (("rows",),), by_rows=False),
        "permutation": Case(permute, (random(0, 64, 16), random(1, 64, EXPERTS)), (("rows",), ("rows",))),
    }  # fmt: skip


def sharded_step(
    case: Case, mesh: Mesh, rows: str, columns: str | None, way: str, resource: te.MeshResource
) -> Any:
    """Run a case's step on arrays sharded over the mesh."""
    # Inside shard_map only rows are sharded: every device has all kernels and heads.
    specs = case.specs(rows, None if way == "shard_map" else columns)
    laid = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    placed = tuple(
        jax.tree.map(lambda leaf, one=one: jax.device_put(leaf, one), array)
        for array, one in zip(case.arrays, laid, strict=True)
    )
    with mesh if way == "with mesh" else jax.set_mesh(mesh), sharding.global_shard_guard(resource):
        if way == "shard_map":
            mapped = jax.shard_map(
                lambda *arrays: jax.lax.pmean(case.loss(*arrays), rows),
                in_specs=specs,
                out_specs=PartitionSpec(),
            )
            return jax.jit(case.step(mapped))(*placed)
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            return jax.jit(case.step(), in_shardings=laid)(*placed)


def main() -> None:
    start_on_host_devices()
    of_name = cases()
    everything = itertools.product(of_name, MESHES, ("with mesh", "set_mesh", "shard_map"))
    result, alone = {}, {}
    for name, mesh_name, way in everything if "--all" in sys.argv else FEW:
        axes, served, rows, columns = MESHES[mesh_name]
        case = of_name[name]
        if way == "shard_map" and (columns is not None or not case.by_rows):
            continue
        if name not in alone:
            alone[name] = jax.jit(case.step())(*case.arrays)
        got = sharded_step(case, create_mesh(**axes), rows, columns, way, te.MeshResource(**served))
        result[f"{name}, {mesh_name}, {way}"] = difference(got, alone[name])
    print(json.dumps(result))


if __name__ == "__main__":
    main()

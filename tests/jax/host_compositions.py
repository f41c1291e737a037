"""Long sequences and sharded layers on eight host devices against one: {case: differences} as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import array, draw_variables, normal, start_on_host_devices
from tests.jax.host_devices import difference
from transformer_engine.common import recipe
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    fused_attn,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from transformer_engine.jax.primitives import kernels
from transformer_engine.jax.primitives.partitioning import ShardingRule

TOKENS, HEADS, DIM = 32, 4, 8


def create_mesh(**axes: int) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(
        tuple(axes.values())
    )
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def both(function, *arguments):
    """Value and gradients for all arguments of a scalar function."""
    return jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arguments)))))(*arguments)


def transformer_layer(**fields) -> te_flax.TransformerLayer:
    return te_flax.TransformerLayer(
        hidden_size=32,
        mlp_hidden_size=64,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )


def mlp_of_tokens(intermediate_dim: int = 64, **fields) -> te_flax.LayerNormMLP:
    """Return a gated MLP whose tokens are sharded over the tensor-parallel axis between its products."""
    tokens = (te.sharding.BATCH_AXES, te.sharding.SEQLEN_TP_AXES, te.sharding.HIDDEN_AXES)
    hidden = (te.sharding.BATCH_AXES, te.sharding.SEQLEN_AXES, te.sharding.HIDDEN_TP_AXES)
    return te_flax.LayerNormMLP(
        intermediate_dim,
        activations=("silu", "linear"),
        layernorm_input_axes=tokens,
        dot_1_input_axes=tokens,
        dot_2_input_axes=hidden,
        scale_axes=(te.sharding.W_NO_SHARD_AXES,),
        ln_bias_axes=(te.sharding.W_NO_SHARD_AXES,),
        kernel_axes_1=(te.sharding.W_FSDP_AXES, te.sharding.W_JOINED_AXES, te.sharding.W_TP_AXES),
        kernel_axes_2=(te.sharding.W_TP_AXES, te.sharding.W_FSDP_AXES),
        **fields,
    )


def layer_case(mesh: Mesh, resource: te.MeshResource, settings, model: nn.Module) -> float:
    """Loss, gradients and state of a layer with parameters sharded over the mesh."""
    x = normal(jax.random.key(0), (8, 16, 32))

    def run(params, state, x):
        def loss(params, state):
            outputs = model.apply({"params": params, **state}, x, deterministic=True)
            return (jax.tree.leaves(outputs)[0] ** 2).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(params, state)

    with te.autocast(settings is not None, settings):
        boxed = draw_variables(model, x, deterministic=True)
        state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
        expected = jax.jit(run)(params, state, x)
    with jax.set_mesh(mesh), te.autocast(settings is not None, settings, mesh_resource=resource):
        rules = te_flax.extend_logical_axis_rules((("heads", None), ("relpos_buckets", None)))
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh(nn.get_partition_spec(boxed)["params"])
            placed = jax.tree.map(
                lambda p, s: jax.device_put(p, NamedSharding(mesh, s)),
                params,
                specs,
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            )
            got = jax.jit(run)(
                placed, state, jax.device_put(x, NamedSharding(mesh, draw_batch(resource)))
            )
    return difference(got, expected)


def draw_batch(resource: te.MeshResource) -> PartitionSpec:
    return PartitionSpec(resource.fsdp_resource or resource.dp_resource)


def attention(layout, mask, softmax=AttnSoftmaxType.VANILLA_SOFTMAX, window=None):
    def run(q, k, v, offset, descriptor, **options):
        return fused_attn(
            (q, k, v),
            None,
            descriptor,
            None,
            AttnBiasType.NO_BIAS,
            mask,
            layout,
            softmax,
            0.3,
            dropout_probability=0.0,
            is_training=True,
            max_segments_per_seq=4,
            window_size=window,
            softmax_offset=offset,
            **options,
        )

    return run


def sequence_case(
    mesh: Mesh, strategy, balanced, layout, mask, softmax, window=None, stripe=None
) -> float:
    """Attention with tokens sharded over "cp": output and gradients for q, k, v and the sinks."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, dy = (normal(key, (2, TOKENS, HEADS, DIM)) for key in keys[:2])
    k, v = (normal(key, (2, TOKENS, HEADS // 2, DIM)) for key in keys[2:])
    learnt = softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX
    offset = jnp.linspace(-1, 1, HEADS).reshape(1, HEADS, 1, 1) if learnt else None
    packed = layout.is_thd()
    ids = array([[1] * 10 + [2] * 15 + [3] * 5 + [0] * 2, [1] * 32])
    places = array([[*range(10), *range(15), *range(5), 0, 0], list(range(32))])
    lengths = array([TOKENS - 5, TOKENS])
    devices = mesh.shape["cp"]
    run = attention(layout, mask, softmax, window)
    order = ReorderStrategy.Striped if packed else ReorderStrategy.DualChunkSwap

    def lay_out(x, undo=False):
        if not balanced:
            return x
        move = inverse_reorder_causal_load_balancing if undo else reorder_causal_load_balancing
        return move(x, order, devices, 1, stripe)

    def descriptor(move):
        if packed:
            return SequenceDescriptor.from_segment_ids_and_pos(move(ids), move(places))
        return SequenceDescriptor.from_seqlens(lengths) if mask.is_padding() else None

    def plain(q, k, v, offset):
        return (run(q, k, v, offset, descriptor(lambda x: x)) * dy).sum()

    def run_over_devices(q, k, v, offset):
        out = run(
            lay_out(q),
            lay_out(k),
            lay_out(v),
            offset,
            descriptor(lay_out),
            context_parallel_axis="cp",
            context_parallel_strategy=strategy,
            context_parallel_causal_load_balanced=balanced,
            stripe_size=stripe,
        )
        return (lay_out(out, undo=True) * dy).sum()

    which = (0, 1, 2, 3) if learnt else (0, 1, 2)
    expected = jax.jit(jax.value_and_grad(plain, argnums=which))(q, k, v, offset)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(cp_resource="cp")):
        got = jax.jit(jax.value_and_grad(run_over_devices, argnums=which))(q, k, v, offset)
    return difference(got, expected)


@dataclass(frozen=True)
class DoubledAndSummed(kernels.Kernel):
    """A kernel replacement that also lowers for CPUs: (2 * x [rows, width], column sums)."""

    rule = ShardingRule("r w -> r w, w", ("w",), summed=(1,))

    def results(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    def run(self, x):
        return 2 * x, x.sum(axis=0)


def kernel_case(mesh: Mesh) -> dict[str, float]:
    """A kernel on rows sharded over eight devices: results, all-gathers in the program, and rows per device."""
    mlir.register_lowering(kernels._kernel, kernels._lower_kernel, platform="cpu")
    x = normal(jax.random.key(0), (16, 24))
    step = jax.jit(lambda x: kernels.call(DoubledAndSummed(), x))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
    doubled, sums = step(placed)
    with jax.set_mesh(mesh):
        laid = PartitionSpec("dp")
        mapped = jax.shard_map(
            lambda x: kernels.call(DoubledAndSummed(), x)[0],
            in_specs=laid,
            out_specs=laid,
            check_vma=False,
        )
        manual = jax.jit(mapped)(placed)
    return {
        "difference": difference((doubled, sums, manual), (2 * x, x.sum(axis=0), 2 * x)),
        "all-gathers": step.lower(placed).compile().as_text().count("all-gather("),
        "rows a device": doubled.addressable_shards[0].data.shape[0],
    }


# Every strategy with a causal mask, padding, a window, sinks and packed sequences; `--all` runs the other cases too.
ATTENTION = {
    CPStrategy.ALL_GATHER: (
        "packed in stripes",
        "causal unbalanced with a window",
        "unbalanced with a window",
    ),
    CPStrategy.RING: (
        "causal balanced",
        "padded with sinks and a window",
        "bottom right",
        "with a window",
    ),
}


def main() -> None:
    everything = "--all" in sys.argv
    start_on_host_devices()
    delayed = recipe.DelayedScaling(amax_history_len=4)
    results = {
        "fsdp": layer_case(
            create_mesh(fsdp=8), te.MeshResource(fsdp_resource="fsdp"), delayed, mlp_of_tokens()
        ),
        "dp and tp with sequences": layer_case(
            create_mesh(dp=2, tpsp=4),
            te.MeshResource(dp_resource="dp", tpsp_resource="tpsp"),
            None,
            transformer_layer(enable_sequence_parallel=True),
        ),
    }
    bshd, thd = QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD
    vanilla, learnt = AttnSoftmaxType.VANILLA_SOFTMAX, AttnSoftmaxType.LEARNABLE_SOFTMAX
    causal, padding = AttnMaskType.CAUSAL_MASK, AttnMaskType.PADDING_CAUSAL_MASK
    mesh = create_mesh(dp=2, cp=4)
    for strategy in (CPStrategy.ALL_GATHER, CPStrategy.RING):
        cases = {
            "causal balanced": (True, bshd, causal, vanilla),
            "padded with sinks and a window": (True, bshd, padding, learnt, (9, 0)),
            "causal with sinks": (True, bshd, AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, learnt),
            "causal unbalanced": (False, bshd, causal, learnt),
            "causal with a window": (True, bshd, causal, vanilla, (9, 0)),
            "causal unbalanced with a window": (False, bshd, causal, learnt, (13, -1)),
            "unbalanced": (False, bshd, AttnMaskType.NO_MASK, vanilla),
            "with a window": (True, bshd, AttnMaskType.NO_MASK, learnt, (5, 9)),
            "unbalanced with a window": (False, bshd, AttnMaskType.NO_MASK, learnt, (-1, 9)),
            "packed in stripes": (True, thd, padding, vanilla),
            "bottom right": (False, bshd, AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK, vanilla),
        }
        for name, case in cases.items():
            if everything or name in ATTENTION[strategy]:
                results[f"{strategy.name} {name}"] = sequence_case(mesh, strategy, *case)
    # Two devices; the window reaches the whole sequence to the left and ends within a chunk to the right.
    results["two devices with a window"] = sequence_case(
        create_mesh(dp=4, cp=2), CPStrategy.RING, True, bshd, AttnMaskType.NO_MASK, learnt, (40, 11)
    )
    if everything:
        results["whole layer over fsdp"] = layer_case(
            create_mesh(fsdp=8), te.MeshResource(fsdp_resource="fsdp"), delayed, transformer_layer()
        )
        results["fsdp and tp in mxfp8"] = layer_case(
            create_mesh(fsdp=4, tpsp=2),
            te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tpsp"),
            recipe.MXFP8BlockScaling(),
            mlp_of_tokens(),
        )
        for name, settings in (
            ("mxfp8", recipe.MXFP8BlockScaling()),
            ("blocks", recipe.Float8BlockScaling()),
        ):
            results[f"whole layer over fsdp and tp in {name}"] = layer_case(
                create_mesh(fsdp=4, tpsp=2),
                te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tpsp"),
                settings,
                transformer_layer(enable_sequence_parallel=True),
            )
        results["dp"] = layer_case(
            create_mesh(dp=8),
            te.MeshResource(dp_resource="dp"),
            delayed,
            transformer_layer(layernorm_type="rmsnorm", mlp_activations=("silu", "linear")),
        )
        results["stripes of several tokens"] = sequence_case(
            mesh, CPStrategy.ALL_GATHER, True, thd, padding, vanilla, stripe=4
        )
    results["kernels"] = kernel_case(create_mesh(dp=8))
    print(json.dumps(results))


if __name__ == "__main__":
    main()

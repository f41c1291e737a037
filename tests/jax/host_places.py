"""Packed rows distributed over host devices, and invalid choices of experts: printed as JSON, {case: difference}."""

from __future__ import annotations

import json
import re
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, start_on_host_devices, zeros
from transformer_engine.common import recipe
from transformer_engine.jax import attention, ep
from transformer_engine.jax.cpp_extensions import ep as ep_passes

LENGTHS = np.asarray([[5, 4, 7], [16, -1, -1]], np.int32)
OFFSETS = np.asarray([[0, 5, 9, 16], [0, 16, -1, -1]], np.int32)
EXPERTS, TOKENS, WIDTH = 4, 3, 4
PASSES = ("recv", "recv weights", "dtokens", "dweights", "combined", "dexpert_out")


def attend(query, key, value, **options):
    descriptor = attention.SequenceDescriptor.from_seqlens_and_offsets(LENGTHS, OFFSETS)
    return attention.fused_attn(
        (query, key, value),
        None,
        descriptor,
        None,
        attention.AttnBiasType.NO_BIAS,
        attention.AttnMaskType.PADDING_CAUSAL_MASK,
        attention.QKVLayout.THD_THD_THD,
        attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        0.4,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=3,
        **options,
    )


def difference(got, expected) -> float:
    return float(np.abs(np.asarray(got) - np.asarray(expected)).max())


def relative_error(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "taken"


def dealt(mesh: Mesh, strategy: attention.CPStrategy, stripe: int, arrays) -> float:
    """Attention of rows in stripes and its gradients, restored to their order, against one device."""
    deal = partial(
        attention.reorder_causal_load_balancing,
        strategy=attention.ReorderStrategy.Striped,
        cp_size=4,
        seq_dim=1,
        stripe_size=stripe,
    )
    back = partial(
        attention.inverse_reorder_causal_load_balancing,
        strategy=attention.ReorderStrategy.Striped,
        cp_size=4,
        seq_dim=1,
        stripe_size=stripe,
    )

    def run_over_devices(*arrays):
        out = attend(
            *(deal(x) for x in arrays),
            context_parallel_axis="cp",
            context_parallel_strategy=strategy,
            context_parallel_causal_load_balanced=True,
            stripe_size=stripe,
        )
        return back(out)

    def with_gradients(call, *arrays):
        return call(*arrays), jax.grad(lambda *arrays: (call(*arrays) ** 2).sum(), (0, 1, 2))(
            *arrays
        )

    expected = jax.jit(partial(with_gradients, attend))(*arrays)
    with (
        jax.set_mesh(mesh),
        te.autocast(enabled=False, mesh_resource=te.MeshResource(cp_resource="cp")),
    ):
        got = jax.jit(partial(with_gradients, run_over_devices))(*arrays)
    return float(np.max([*map(difference, jax.tree.leaves(got), jax.tree.leaves(expected))]))


def resource_errors(mesh: Mesh) -> dict[str, object]:
    """Errors against float64, and collectives, of a layer that gets its axis from MeshResource.cp_resource alone."""
    arrays = normal(jax.random.key(5), (3, 2, 16, 2, 4))
    scores = np.einsum("bqhd,bkhd->bhqk", *np.asarray(arrays[:2], np.float64)) / 2.0
    weights = np.exp(np.where(np.tri(16, dtype=bool), scores, -np.inf))
    expected = np.einsum(
        "bhqk,bkhd->bqhd",
        weights / weights.sum(-1, keepdims=True),
        np.asarray(arrays[2], np.float64),
    )
    order = {"strategy": attention.ReorderStrategy.DualChunkSwap, "cp_size": 4, "seq_dim": 1}
    resource = te.MeshResource(cp_resource="cp")
    facts: dict[str, object] = {}
    for balanced in (False, True):
        module = te_flax.DotProductAttention(4, 2, context_parallel_causal_load_balanced=balanced)
        args = arrays
        if balanced:
            args = [attention.reorder_causal_load_balancing(x, **order) for x in arrays]
        with jax.set_mesh(mesh), te.autocast(enabled=False, mesh_resource=resource):
            call = jax.jit(lambda *qkv, module=module: module.apply({}, *qkv, deterministic=True))
            compiled = call.lower(*args).compile().as_text()
            out = call(*args)
            if not balanced:  # a length that four devices do not divide, as in decoding
                single = module.apply({}, *(x[:, :1] for x in args), deterministic=True)
                facts["resource, one token"] = difference(single, args[2][:, :1])
        out = attention.inverse_reorder_causal_load_balancing(out, **order) if balanced else out
        facts[f"resource, balanced={balanced}"] = difference(out, expected)
        facts[f"resource, balanced={balanced}, collectives"] = len(
            re.findall(r"(?:all-gather|collective-permute)(?:-start)?\(", compiled)
        )
    return facts


def dispatch_errors(mesh: Mesh, choices) -> dict[str, object]:
    """Expert e multiplies by e + 1. Compare the results of tokens with a sum over their choices from 0 to E - 1."""
    tokens = normal(jax.random.key(1), (2 * TOKENS, WIDTH))
    weights = jax.random.uniform(jax.random.key(2), (2 * TOKENS, 2))
    choices = jnp.broadcast_to(jnp.asarray(choices, jnp.int32), weights.shape)
    ep.ep_finalize()
    capacity = 4 * TOKENS
    cfg = ep.ep_bootstrap(2, 0, EXPERTS, TOKENS, capacity, WIDTH, jnp.float32)
    specs = PartitionSpec("ep")

    def run_on_device(choices, tokens, weights):
        rows, of_rows, handle, counts, total = ep.ep_dispatch(
            cfg, choices, tokens, weights, capacity
        )
        local = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(capacity), side="right")
        scale = jax.lax.axis_index("ep") * cfg.local_experts + local + 1
        result = rows * (scale * of_rows)[:, None]
        return ep.ep_combine(cfg, handle, counts, result, TOKENS), total[None]

    mapped = jax.shard_map(
        run_on_device, mesh=mesh, in_specs=(specs,) * 3, out_specs=(specs, specs), check_vma=False
    )
    with jax.set_mesh(mesh):
        out, total = jax.jit(mapped)(choices, tokens, weights)
    real = (choices >= 0) & (choices < EXPERTS)
    factors = jnp.where(real, weights * (choices + 1), 0.0).sum(axis=1)
    return {
        "difference": difference(out, tokens * factors[:, None]),
        "sent": total.tolist(),
        "real": int(real.sum()),
    }


def passes(mesh: Mesh, capacity: int, alignment: int) -> dict[str, float]:
    """Compare the dispatch and combine passes with JAX's gradients; small capacities drop rows."""
    tokens, dout = normal(jax.random.key(1), (2, 2 * TOKENS, WIDTH))
    weights = jax.random.uniform(jax.random.key(2), (2 * TOKENS, 2))
    choices = jnp.stack(
        (jnp.arange(2 * TOKENS) % EXPERTS, (jnp.arange(2 * TOKENS) + 1) % EXPERTS), axis=1
    )
    factors = jax.random.uniform(jax.random.key(3), (2 * capacity, WIDTH))
    ep.ep_finalize()
    ep.ep_bootstrap(2, 0, EXPERTS, TOKENS, capacity, WIDTH, jnp.float32)
    cfg = ep.EpLayerConfig(2, alignment)
    specs = PartitionSpec("ep")

    def jax_results(choices, tokens, weights, factors, dout):
        def there(tokens, weights):
            rows, of_rows, *rest = ep.ep_dispatch(cfg, choices, tokens, weights, capacity)
            return (rows, of_rows), rest

        received, pull_dispatch, (handle, counts, _) = jax.vjp(there, tokens, weights, has_aux=True)
        y, pull_combine = jax.vjp(
            lambda rows: ep.ep_combine(cfg, handle, counts, rows, TOKENS), factors
        )
        return *received, *pull_dispatch((factors, factors[:, 0])), y, *pull_combine(dout)

    def pass_results(choices, tokens, weights, factors, dout):
        counts, _, handle = ep_passes.ep_prepare(cfg, choices)
        return (
            *ep_passes.ep_dispatch_fwd(cfg, handle, choices, tokens, weights, capacity),
            *ep_passes.ep_dispatch_bwd(cfg, handle, factors, factors[:, 0]),
            ep_passes.ep_combine_fwd(cfg, handle, counts, factors, TOKENS),
            ep_passes.ep_combine_bwd(cfg, handle, counts, dout, capacity),
        )

    def map_axes(function):
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=(specs,) * 5, out_specs=specs, check_vma=False
            )
        )

    arrays = choices, tokens, weights, factors, dout
    with jax.set_mesh(mesh):
        pairs = zip(map_axes(pass_results)(*arrays), map_axes(jax_results)(*arrays), strict=True)
        return dict(zip(PASSES, (difference(ours, jaxs) for ours, jaxs in pairs), strict=True))


def shard_map_results(mesh: Mesh) -> dict[str, float]:
    """Gradients and next states inside shard_map, which by default counts over which axes values vary."""
    model = te_flax.LayerNormMLP(
        intermediate_dim=32,
        use_bias=True,
        activations=("silu", "linear"),
        scale_axes=(None,),
        ln_bias_axes=(None,),
        kernel_axes_1=(None,) * 3,
        kernel_axes_2=(None,) * 2,
    )
    x = normal(jax.random.key(3), (4, 32, 32)) * jnp.arange(1.0, 5.0)[:, None, None]

    def gradients(params, state, x):
        def loss(params, state):
            return (model.apply({"params": params, **state}, x)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(params, state)

    full, facts = PartitionSpec(), {}
    for name, enabled in (("values", False), ("delayed scaling", True)):
        options = {"enabled": enabled, "recipe": recipe.DelayedScaling(amax_history_len=2)}
        with te.autocast(**options):
            state, params = flax.core.pop(nn.meta.unbox(draw_variables(model, x)), "params")
            expected = jax.jit(gradients)(params, state, x)
        with te.autocast(**options, mesh_resource=te.MeshResource(dp_resource="dp")):
            parts = (full, full, PartitionSpec("dp"))
            got = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=parts, out_specs=full))(
                params, state, x
            )
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        facts[name] = max(difference(a, b) / float(jnp.abs(b).max()) for a, b in pairs)
    return facts


def main() -> None:
    start_on_host_devices()
    devices = np.asarray(jax.devices())
    mesh = Mesh(devices[:4], ("cp",))
    arrays = normal(jax.random.key(0), (3, 2, 16, 2, 4))
    facts: dict[str, object] = {
        f"{strategy.name} {stripe}": dealt(mesh, strategy, stripe, arrays)
        for strategy, stripe in (
            (attention.CPStrategy.ALL_GATHER, 1),
            (attention.CPStrategy.ALL_GATHER, 2),
            (attention.CPStrategy.RING, 1),
        )
    }
    manual = jax.shard_map(
        partial(attend, context_parallel_axis="cp"),
        mesh=mesh,
        in_specs=PartitionSpec(None, "cp"),
        out_specs=PartitionSpec(None, "cp"),
        check_vma=False,
    )
    with (
        jax.set_mesh(mesh),
        te.autocast(enabled=False, mesh_resource=te.MeshResource(cp_resource="cp")),
    ):
        facts["no axis"] = relative_error(lambda: attend(*arrays, context_parallel_axis="tp"))
        facts["no axis, a layer"] = relative_error(
            lambda: te_flax.DotProductAttention(
                head_dim=4,
                num_attention_heads=2,
                context_parallel_axis="tp",
                context_parallel_causal_load_balanced=True,
            ).apply({}, *arrays, deterministic=True)
        )
        facts["manual"] = relative_error(lambda: jax.jit(manual)(*arrays))
    facts |= resource_errors(mesh)
    facts |= shard_map_results(Mesh(devices[:2], ("dp",)))
    experts = Mesh(devices[:2], ("ep",))
    for name, choices in (("below", [0, -1]), ("all below", [-1, -1]), ("above", [3, EXPERTS])):
        facts[name] = dispatch_errors(experts, choices)
    for capacity, alignment in ((4 * TOKENS + 16, 4), (5, 0)):
        facts[f"passes, capacity {capacity}"] = passes(experts, capacity, alignment)
    ep.ep_finalize()
    cfg = ep.ep_bootstrap(4, 0, EXPERTS, TOKENS, 8, WIDTH)
    args = (cfg, zeros((TOKENS, 2), jnp.int32), zeros((TOKENS, WIDTH)), zeros((TOKENS, 2)), 8)
    facts["outside"] = relative_error(lambda: ep.ep_dispatch(*args))
    with jax.set_mesh(experts):
        full = PartitionSpec()
        fewer = jax.shard_map(
            lambda tokens: ep.ep_dispatch(cfg, args[1], tokens, *args[3:])[0],
            mesh=experts,
            in_specs=full,
            out_specs=full,
            check_vma=False,
        )
        facts["fewer"] = relative_error(lambda: jax.jit(fewer)(args[2]))
    ep.ep_finalize()
    with te.autocast(enabled=False, mesh_resource=te.MeshResource(ep_resource="experts")):
        facts["axis"] = ep.ep_bootstrap(2, 0, EXPERTS, TOKENS, 8, WIDTH).axis
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

"""Attention of a sequence over host devices by kernels: as cuDNN would do it, and lowered for CUDA: {case: facts}."""

from __future__ import annotations

import functools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as library
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

import transformer_engine.jax as te
from tests.jax.compiled import normal, start_on_host_devices, zeros
from tests.jax.host_compositions import create_mesh
from tests.jax.host_devices import difference
from transformer_engine.jax import attention as api
from transformer_engine.jax.context_parallel import parts
from transformer_engine.jax.primitives.attention import Parts, cudnn, reference

STRATEGIES = (api.CPStrategy.ALL_GATHER, api.CPStrategy.RING)


def attention(
    q,
    k,
    v,
    mask=api.AttnMaskType.CAUSAL_MASK,
    softmax_type=api.AttnSoftmaxType.VANILLA_SOFTMAX,
    **options,
):
    return api.fused_attn(
        (q, k, v),
        bias=None,
        sequence_descriptor=None,
        seed=None,
        attn_bias_type=api.AttnBiasType.NO_BIAS,
        attn_mask_type=mask,
        qkv_layout=api.QKVLayout.BSHD_BSHD_BSHD,
        softmax_type=softmax_type,
        scaling_factor=0.2,
        dropout_probability=0.0,
        is_training=True,
        **options,
    )


def sharded_results(strategy, **options):
    return functools.partial(
        attention,
        context_parallel_axis="cp",
        context_parallel_strategy=strategy,
        context_parallel_causal_load_balanced=True,
        **options,
    )


def step(function, dy, *arrays):
    out, pullback = jax.vjp(function, *arrays)
    return out, *pullback(dy)


def create_mask(kind) -> api.AttnMaskType:
    return api.AttnMaskType.CAUSAL_MASK if kind.name == "CAUSAL" else api.AttnMaskType.NO_MASK


def forward(q, k, v, *rest, scale, mask_type, **options):
    return list(reference.forward_part(q, k, v, scale, create_mask(mask_type)))


def backward(q, k, v, *rest, scale, mask_type, **options):
    level, out, dout = rest[7:]
    return list(reference.backward_part(q, k, v, out, level, dout, scale, create_mask(mask_type)))


def check_cudnn_call() -> dict[str, float]:
    """JAX's cuDNN call, with jnp operations instead of the library, on 2 x 2 x 2 devices against one."""
    for primitive, function in (
        (library._dot_product_attention_fwd_p, forward),
        (library._dot_product_attention_bwd_p, backward),
    ):
        mlir.register_lowering(
            primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu"
        )
    library.check_cudnn_version = lambda: 91900
    library.check_compute_capability = lambda least: True

    def bound(request, scale):
        both = cudnn.BACKEND.bind(request._replace(tokens="part"))
        return Parts(*(functools.partial(one, scale=scale) for one in both))

    chosen, parts.attention_parts = parts.attention_parts, bound
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        normal(key, (2, 32, n, 16), jnp.bfloat16) for key, n in zip(keys, (4, 4, 2, 2), strict=True)
    ]
    expected = jax.jit(functools.partial(step, attention))(*arrays)
    mesh = create_mesh(dp=2, tp=2, cp=2)
    resource = te.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
    laid = [
        api.reorder_causal_load_balancing(x, api.ReorderStrategy.DualChunkSwap, 2, 1)
        for x in arrays
    ]
    results = {}
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        laid = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp", "cp", "tp"))) for x in laid
        ]
        for strategy in STRATEGIES:
            program = (
                jax.jit(functools.partial(step, sharded_results(strategy))).lower(*laid).compile()
            )
            got = [
                api.inverse_reorder_causal_load_balancing(
                    x, api.ReorderStrategy.DualChunkSwap, 2, 1
                )
                for x in program(*laid)
            ]
            text = program.as_text() or ""
            moved = set(
                re.findall(r" (all-gather|collective-permute|all-to-all)(?:-start)?\(", text)
            )
            results[strategy.name] = {
                "difference": float(
                    np.max([difference(x, y) for x, y in zip(got, expected, strict=True)])
                ),
                "moves": sorted(moved),
            }
    parts.attention_parts = chosen
    return results


def lower_attention() -> dict[str, dict[str, int]]:
    """Both passes with 16384 tokens on two devices for CUDA: kernel calls and the largest array's size.

    A 4096-token window reaches from each chunk (four in all) into its neighbor on that side.
    """
    os.environ["TE_JAX_KERNELS"] = "1"
    tokens, mesh = 16384, create_mesh(cp=2)
    cut = NamedSharding(mesh, PartitionSpec(None, "cp"))
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, 64), jnp.bfloat16, sharding=cut) for n in (4, 2))
    results = {}
    causal = api.AttnMaskType.CAUSAL_MASK
    cases: dict[str, tuple[api.CPStrategy, api.AttnMaskType, tuple[int, int] | None]] = {
        **{one.name: (one, causal, None) for one in STRATEGIES},
        "causal window": (api.CPStrategy.RING, causal, (4096, 0)),
        "window": (api.CPStrategy.ALL_GATHER, api.AttnMaskType.NO_MASK, (4096, 4096)),
    }
    for name, (strategy, mask, window) in cases.items():
        with jax.set_mesh(mesh):
            program = jax.jit(
                functools.partial(step, sharded_results(strategy, mask=mask, window_size=window))
            )
            text = program.trace(q, q, k, k).lower(lowering_platforms=("cuda",)).as_text()
        shapes = re.findall(r"tensor<((?:\d+x)+)", text)
        results[name] = {
            "kernels": text.count("triton_kernel_call_ffi"),
            "largest": max(int(np.prod([int(n) for n in one.split("x")[:-1]])) for one in shapes),
            "queries": tokens * 4 * 64,
        }
    return results


def explanations() -> dict[str, str]:
    """Output from te.explain for supported and unsupported attention."""
    q, k, longer = (zeros((1, n, 4, 64), jnp.bfloat16) for n in (16, 16, 32))
    causal, no_mask = api.AttnMaskType.CAUSAL_MASK, api.AttnMaskType.NO_MASK
    with jax.set_mesh(create_mesh(cp=2)):
        return {
            name: str(
                te.explain(
                    sharded_results(api.CPStrategy.ALL_GATHER),
                    q,
                    keys,
                    keys,
                    mask=mask,
                    window_size=window,
                )
            )
            for name, keys, mask, window in (
                ("whole", k, causal, None),
                ("causal window", k, causal, (3, 0)),
                ("window", k, no_mask, (3, 2)),
                ("window of other keys", longer, no_mask, (3, 0)),
            )
        }


def shard_map_gradients() -> dict[str, float]:
    """Gradients, of shared sinks too, inside a shard_map that counts what varies over its axis."""
    q, k, dy = (normal(jax.random.key(n), (2, 16, n, 16)) for n in (4, 2, 4))
    sinks, actual = jnp.linspace(-1, 1, 4).reshape(1, 4, 1, 1), {}

    def sunk(strategy, q, k, v, sinks):
        learnt = {"softmax_type": api.AttnSoftmaxType.LEARNABLE_SOFTMAX, "softmax_offset": sinks}
        return sharded_results(strategy, **learnt)(q, k, v)

    with jax.set_mesh(create_mesh(dp=2, cp=2)):
        for strategy in STRATEGIES:
            function, laid = functools.partial(sunk, strategy), PartitionSpec("dp")
            specs = (laid, laid, laid, PartitionSpec())
            mapped = jax.shard_map(function, in_specs=specs, out_specs=laid, axis_names={"dp"})
            got, expected = (
                jax.jit(functools.partial(step, one))(dy, q, k, k, sinks)
                for one in (mapped, function)
            )
            actual[strategy.name] = difference(got, expected)
    return actual


def main() -> None:
    start_on_host_devices()
    print(
        json.dumps(
            {
                "cuda": lower_attention(),
                "explained": explanations(),
                "within": shard_map_gradients(),
                "cudnn": check_cudnn_call(),
            }
        )
    )


if __name__ == "__main__":
    main()

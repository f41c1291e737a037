"""A layer on eight host devices against one, and the arrays that its devices exchange: {case: facts} as JSON.

Products of codes as on CUDA, in the partitioner's hands; the rest by the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, start_on_host_devices
from tests.jax.host_compositions import mlp_of_tokens
from tests.jax.host_devices import difference
from transformer_engine.common import recipe
from transformer_engine.common.dispatch import Backend, Table
from transformer_engine.common.formats import FLOAT8
from transformer_engine.jax.primitives import gemm, kernels
from transformer_engine.jax.primitives.gemm import decoded, float8, reference

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "mlp_hidden_size": 96,
    "num_attention_heads": 8,
    "num_gqa_groups": 4,
    "layernorm_type": "rmsnorm",
    "mlp_activations": ("silu", "linear"),
    "enable_relative_embedding": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "dtype": jnp.bfloat16,
}
TOKENS = 48  # no extent of a kernel
RECIPES = {
    "values": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    # A sum in another order could change the direction of stochastic rounding.
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# Each device's shard has whole blocks, both in every kernel and along the sequence.
# In float32 a sum in another order changes only a few codes.
IN_BLOCKS = {"hidden_size": 128, "mlp_hidden_size": 256, "num_gqa_groups": 8, "dtype": jnp.float32}
TOKENS_IN_BLOCKS = 384
BLOCKS = ("mxfp8", "nvfp4")
LAYOUTS = {
    "tp": {"tp": 4, "dp": 2},
    "tpsp": {"tpsp": 4, "dp": 2},
    "fsdp": {"fsdp": 4},
    "both": {"fsdp": 2, "tpsp": 4},
}
CASES = [("attention", "current", "both"), ("mlp", "mxfp8", "tp")]  # every axis once
OTHER_CASES = [
    ("current", "both"),
    ("mxfp8", "tp"),
    ("values", "tpsp"),
    ("delayed", "fsdp"),
    ("delayed", "tp"),
    ("delayed", "tpsp"),
    ("mxfp8", "both"),
    ("nvfp4", "both"),
]


def create_model(kind: str, sizes: dict[str, Any], sequence_parallel: bool = False) -> nn.Module:
    """Create a transformer layer, or one half, which compiles in half the time."""
    if kind == "layer":
        return te_flax.TransformerLayer(**sizes, enable_sequence_parallel=sequence_parallel)
    if kind == "attention":
        return te_flax.MultiHeadAttention(
            head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
            layernorm_type="rmsnorm",
            num_attention_heads=sizes["num_attention_heads"],
            num_gqa_groups=sizes["num_gqa_groups"],
            attention_dropout=0.0,
            dtype=sizes["dtype"],
            enable_sequence_parallel=sequence_parallel,
        )
    return mlp_of_tokens(sizes["mlp_hidden_size"], layernorm_type="rmsnorm", dtype=sizes["dtype"])


def model_inputs(kind: str, x: jax.Array) -> tuple[jax.Array, ...]:
    """Draw the model's inputs; for attention, queries and keys."""
    return (x, x) if kind == "attention" else (x,)


def as_on_cuda() -> None:
    """Use kernels for quantized products on this platform, too."""

    def unsupported_reason(request) -> str | None:
        return (
            None if request.a_format == request.b_format == FLOAT8 else "an operand is not in codes"
        )

    def blocks_unsupported_reason(request) -> str | None:
        return decoded.unsupported_reason(dataclasses.replace(request, platform="cuda"))

    scaled = Backend(
        "scaled", unsupported_reason=unsupported_reason, bind=lambda request: float8.run_scaled
    )
    blocks = Backend(
        "decoded", unsupported_reason=blocks_unsupported_reason, bind=decoded.BACKEND.bind
    )
    gemm.TABLE = Table("jax_gemm", (scaled, blocks, reference.DOT, reference.BACKEND))
    mlir.register_lowering(kernels._kernel, kernels._lower_kernel, platform="cpu")


def exchange(text: str) -> list[tuple[str, str, list[int]]]:
    """(collective, dtype, shape) for every array that devices exchange."""
    results = []
    for line in text.splitlines():
        if match := re.search(
            r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\(", line
        ):
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
                results.append(
                    (match.group(2), dtype, [int(size) for size in shape.split(",") if size])
                )
    return results


def step(kind, model, state, params, x):
    def run(state, params, x):
        outputs = model.apply(
            {"params": params, **state}, *model_inputs(kind, x), deterministic=True
        )
        return jax.tree.leaves(outputs)[0]

    y, pullback = jax.vjp(run, state, params, x)
    following, *gradients = pullback(y)
    return y, gradients, following


@functools.cache
def one_device_step(kind: str, name: str) -> tuple[Any, Any, Any]:
    """Boxed variables, the input, and the results from one step on one device."""
    sizes = SIZES | (IN_BLOCKS if name in BLOCKS else {})
    model = create_model(kind, sizes)
    tokens = TOKENS_IN_BLOCKS if name in BLOCKS else TOKENS
    x = normal(jax.random.key(0), (4, tokens, sizes["hidden_size"]), sizes["dtype"])
    with te.autocast(RECIPES[name] is not None, RECIPES[name]):
        boxed = draw_variables(model, *model_inputs(kind, x), deterministic=True)
        state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
        return boxed, x, jax.jit(lambda *a: step(kind, model, *a))(state, params, x)


def facts(kind: str, name: str, axes: dict[str, int]) -> dict[str, Any]:
    sizes = SIZES | (IN_BLOCKS if name in BLOCKS else {})
    model = create_model(kind, sizes, sequence_parallel="tpsp" in axes)
    count = int(np.prod([*axes.values()]))
    mesh = Mesh(
        np.asarray(jax.devices()[:count]).reshape(*axes.values()),
        (*axes,),
        axis_types=(AxisType.Auto,) * len(axes),
    )
    resource = te.MeshResource(**{f"{axis}_resource": axis for axis in axes})
    boxed, x, expected = one_device_step(kind, name)
    state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
    with (
        jax.set_mesh(mesh),
        te.autocast(RECIPES[name] is not None, RECIPES[name], mesh_resource=resource),
        nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())),
    ):
        specs = nn.logical_to_mesh(nn.get_partition_spec(boxed)["params"])
        laid = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda s: isinstance(s, PartitionSpec),
        )
        rows = PartitionSpec("fsdp" if "fsdp" in axes else "dp", resource.tpsp_resource)
        tokens = NamedSharding(mesh, rows)
        run = jax.jit(
            lambda *a: step(kind, model, *a), out_shardings=(tokens, [laid, tokens], None)
        )
        args = state, jax.device_put(params, laid), jax.device_put(x, tokens)
        compiled = run.lower(*args).compile()
        got = compiled(*args)
    parts = ("output", "gradients", "state")
    kernels = [leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return {
        "exchanged": exchange(compiled.as_text() or ""),
        "tokens": x.shape[1],
        "width": x.shape[2],
        "in blocks": name in BLOCKS,
        "kernels": len(kernels),
        "smallest kernel": min(kernels),
    } | {
        name: difference(a, b)
        for name, a, b in zip(parts, got, expected, strict=True)
        if jax.tree.leaves(b)
    }


def main() -> None:
    start_on_host_devices()
    as_on_cuda()
    cases = [("layer", *case) for case in OTHER_CASES] if "--others" in sys.argv else CASES
    results = {
        f"{kind} {name} {layout}": facts(kind, name, LAYOUTS[layout])
        for kind, name, layout in cases
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()

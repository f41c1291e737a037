"""Temporary memory, compile time and step time for JAX layers on one GPU, comparing orders in the backward pass.

    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python benchmarks/jax_memory.py memory.json [--only TEXT]

FP8 layers are measured with two backward-pass orders, whose gradients are equal:

    one pass         dy is read once and cast to both directions; both copies of its codes live during dX
    late transpose   dy is cast to rows; after dX its codes are transposed for dW (the default for large gradients)

A linear layer [8192, 4096] x [4096, 14336] needs 112 (codes of dy) + 56 (codes of the kernel) + 32 MiB (workspace of
cuBLASLt) in addition to its outputs in the first order, and 112 + 32 (codes of x) + 32 in the second. --quick measures
small sizes on any machine: gradients are compared, figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax import Array

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe as recipes
from transformer_engine.jax.functions import products

RECIPES: dict[str, recipes.Recipe | None] = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
}
ORDERS = {"one pass": 1 << 62, "late transpose": 1}  # `products.LATE_ELEMENTS`


@contextmanager
def order_layers(name: str) -> Iterator[None]:
    """Differentiate layers in the named order within this block."""
    usual = products.LATE_ELEMENTS
    products.LATE_ELEMENTS = ORDERS[name]
    try:
        yield
    finally:
        products.LATE_ELEMENTS = usual


def layers(quick: bool) -> dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]]:
    """{case: (module, shape of x, call options)}"""
    tokens, hidden, wide = (64, 32, 48) if quick else (8192, 4096, 14336)
    dtype = {"dtype": jnp.bfloat16}
    swiglu = {
        "mlp_activations": ("silu", "linear"),
        "use_bias": False,
        "layernorm_type": "rmsnorm",
        **dtype,
    }
    small = {
        "hidden_size": 64,
        "mlp_hidden_size": 128,
        "num_attention_heads": 4,
        "num_gqa_groups": 4,
    }
    if not quick:
        small = {
            "hidden_size": 1024,
            "mlp_hidden_size": 4096,
            "num_attention_heads": 16,
            "num_gqa_groups": 16,
        }
    mlp = te_flax.LayerNormMLP(
        intermediate_dim=wide,
        activations=("silu", "linear"),
        layernorm_type="rmsnorm",
        use_bias=False,
        intermediate_dropout_rate=0.0,
        **dtype,
    )
    layer = te_flax.TransformerLayer(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        intermediate_dropout=0.0,
        self_attn_mask_type="causal",
        enable_rotary_pos_emb=True,
        enable_relative_embedding=False,
        transpose_batch_sequence=False,
        **small,
        **swiglu,
    )
    return {
        "linear": (te_flax.DenseGeneral(features=wide, **dtype), (tokens, hidden), {}),
        "mlp": (mlp, (1, tokens, hidden), {}),
        "small layer": (
            layer,
            (4, 32 if quick else 128, small["hidden_size"]),
            {"deterministic": True},
        ),
    }


def step_gradients(
    module: Any, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The gradients of a layer and its arguments, as a training step without donated arrays has them."""
    x = jax.random.normal(jax.random.key(5), shape, jnp.bfloat16)
    variables = module.init(jax.random.key(0), x, **options)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables.get("params", {}))
    rest = {
        name: value for name, value in variables.items() if name not in ("params", "params_axes")
    }

    def apply(params: Any, rest: Any, x: Array) -> Array:
        result = module.apply({"params": params, **rest}, x, **options)
        return result[0] if isinstance(result, tuple) else result

    y = jax.eval_shape(apply, params, rest, x)
    dy = jax.random.normal(jax.random.key(9), y.shape, y.dtype)

    def loss(params: Any, rest: Any, dy: Array, x: Array) -> Array:
        return jnp.sum(apply(params, rest, x).astype(jnp.float32) * dy.astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 3), allow_int=True), (params, rest, dy, x)


def measure_program(function: Any, arguments: tuple[Any, ...]) -> tuple[dict[str, float], Any]:
    """One program's figures and results."""
    start = time.perf_counter()
    traced = jax.jit(function).trace(*arguments)
    after_trace = time.perf_counter()
    lowered = traced.lower()
    after_lowering = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(20):
            out = program(*arguments)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - begin) / 20)
    analysis = program.memory_analysis()
    figures = {
        "temp_mib": analysis.temp_size_in_bytes / 2**20,
        "ms": 1e3 * best,
        "trace_s": after_trace - start,
        "lower_s": after_lowering - after_trace,
        "compile_s": compiled - after_lowering,
    }
    return {name: round(value, 4) for name, value in figures.items()}, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sizes, on any machine")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case, (module, shape, options) in layers(chosen.quick).items():
        for recipe_name, recipe in RECIPES.items():
            orders = ("one pass",) if recipe is None else tuple(ORDERS)
            reference: Any = None
            for order in orders:
                name = f"{case}/{recipe_name}/{order}"
                if chosen.only not in name:
                    continue
                with te.autocast(enabled=recipe is not None, recipe=recipe), order_layers(order):
                    figures, result = measure_program(*step_gradients(module, shape, options))
                reference = result if reference is None else reference
                equal = all(
                    map(jnp.array_equal, jax.tree.leaves(result), jax.tree.leaves(reference))
                )
                rows.append({"case": name, "same_gradients": equal, **figures})
                print(json.dumps(rows[-1]), flush=True)
                chosen.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One GPU against several from JAX: a Llama 8B layer with sharded batch, width or parameters, experts, long sequences.

    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python benchmarks/jax_ranks.py figures.json [--devices 4]

Wall milliseconds for a forward and backward step in a loop. The speedup is throughput on all GPUs relative to
one GPU. The experts are those of a layer of Qwen3-30B-A3B, whose tokens travel in ragged all-to-alls. Rows are
written one by one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe
from transformer_engine.jax import attention

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
}
TOKENS, LONG = 8192, 65536
LLAMA = {
    "hidden_size": 4096,
    "mlp_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_gqa_groups": 8,
    "layernorm_type": "rmsnorm",
    "mlp_activations": ("silu", "linear"),
    "enable_relative_embedding": False,
    "enable_rotary_pos_emb": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "dtype": jnp.bfloat16,
}
QWEN3 = {"hidden": 2048, "inner": 768, "experts": 128, "chosen": 8}
QUICK = {"hidden_size": 256, "mlp_hidden_size": 512, "num_attention_heads": 4, "num_gqa_groups": 2}


@dataclass(frozen=True)
class Layout:
    """A layer's sharding over devices, and the number of sequences per step."""

    name: str
    devices: int = 1
    axis: str = "one"
    sequences: int = 1

    @property
    def resource(self) -> te.MeshResource:
        return te.MeshResource(**{} if self.axis == "one" else {f"{self.axis}_resource": self.axis})


def layouts(devices: int) -> tuple[Layout, ...]:
    return (
        Layout("one"),
        Layout(f"tp {devices}", devices, "tpsp"),
        Layout(f"dp {devices}", devices, "dp", devices),
        Layout(f"fsdp {devices}", devices, "fsdp", devices),
    )


def create_mesh(axis: str, devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]), (axis,), axis_types=(AxisType.Auto,))


def milliseconds(step: Callable[..., Any], state: Any, *rest: Any, runs: int = 10) -> float:
    """Milliseconds per step; a step's first result is the next state."""
    for _ in range(3):
        state, out = step(state, *rest)
    jax.block_until_ready((state, out))
    start = time.perf_counter()
    for _ in range(runs):
        state, out = step(state, *rest)
    jax.block_until_ready((state, out))
    return 1e3 * (time.perf_counter() - start) / runs


def layer(
    layout: Layout, settings: recipe.Recipe | None, sizes: dict[str, Any], tokens: int
) -> float:
    """Milliseconds for the layer's step."""
    model = te_flax.TransformerLayer(**sizes, enable_sequence_parallel=layout.axis == "tpsp")
    mesh = create_mesh(layout.axis, layout.devices)
    resource = layout.resource
    precision = te.autocast(settings is not None, settings, mesh_resource=resource)
    with jax.set_mesh(mesh), precision:
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            batch = PartitionSpec(
                resource.dp_resource or resource.fsdp_resource, resource.tpsp_resource
            )
            shape = (layout.sequences, tokens, sizes["hidden_size"])
            x, dy = (
                jax.device_put(
                    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16),
                    NamedSharding(mesh, batch),
                )
                for i in range(2)
            )
            boxed = jax.jit(lambda key, x: model.init(key, x, deterministic=True))(
                jax.random.key(2), x
            )
            specs = nn.logical_to_mesh(nn.get_partition_spec(boxed)["params"])
            state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
            full = NamedSharding(mesh, PartitionSpec())
            laid = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                specs,
                is_leaf=lambda s: isinstance(s, PartitionSpec),
            )
            params = jax.tree.map(jax.device_put, params, laid)
            state = jax.device_put(state, full)

            def step(state: Any, params: Any, x: Any, dy: Any) -> Any:
                def run(state: Any, params: Any, x: Any) -> Any:
                    return model.apply({"params": params, **state}, x, deterministic=True)

                y, pullback = jax.vjp(run, state, params, x)
                state, *gradients = pullback(dy)
                return state, (y, *gradients)

            shardings = (jax.tree.map(lambda _: full, state), (x.sharding, laid, x.sharding))
            compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings)
            return milliseconds(compiled, state, params, x, dy)


def sequence(devices: int, strategy: str, tokens: int, heads: int, groups: int) -> float:
    """Milliseconds for causal attention over a sharded sequence."""
    mesh = create_mesh("cp", devices)
    module = te_flax.DotProductAttention(
        head_dim=128,
        num_attention_heads=heads,
        num_gqa_groups=groups,
        attn_mask_type="causal",
        context_parallel_axis="cp" if devices > 1 else "",
        context_parallel_strategy=strategy,
        context_parallel_causal_load_balanced=devices > 1,
    )
    resource = te.MeshResource(cp_resource="cp" if devices > 1 else None)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        cut = NamedSharding(mesh, PartitionSpec(None, "cp"))

        def tensor(seed: int, heads: int) -> Any:
            x = jax.random.normal(jax.random.key(seed), (1, tokens, heads, 128), jnp.bfloat16)
            if devices > 1:
                order = attention.ReorderStrategy.DualChunkSwap
                x = attention.reorder_causal_load_balancing(x, order, devices, 1)
            return jax.device_put(x, cut)

        q, k, v = tensor(0, heads), tensor(1, groups), tensor(2, groups)
        dy = jax.device_put(jnp.ones((1, tokens, heads, 128), jnp.bfloat16), cut)

        def step(state: Any, q: Any, k: Any, v: Any, dy: Any) -> Any:
            def run(q: Any, k: Any, v: Any) -> Any:
                return module.apply({}, q, k, v, deterministic=True).reshape(dy.shape)

            y, pullback = jax.vjp(run, q, k, v)
            return state, (y, *pullback(dy))

        return milliseconds(jax.jit(step), jnp.zeros(()), q, k, v, dy, runs=5)


def experts(
    devices: int, settings: recipe.Recipe | None, sizes: dict[str, int], tokens: int
) -> float:
    """Milliseconds for a mixture of experts, whose experts and tokens are sharded over the devices."""
    fields = {
        "num_experts": sizes["experts"],
        "num_experts_per_tok": sizes["chosen"],
        "dtype": jnp.bfloat16,
    }
    fields |= {"intermediate_size": sizes["inner"], "aux_loss_coeff": 0.01}
    one = te_flax._MoEBlock(**fields)
    model = te_flax._MoEBlock(**fields, ep_axis="ep") if devices > 1 else one
    mesh = create_mesh("ep", devices)
    x = jax.random.normal(jax.random.key(0), (devices, tokens, sizes["hidden"]), jnp.bfloat16)
    precision = te.autocast(settings is not None, settings)
    with precision:
        boxed = jax.jit(one.init)(jax.random.key(1), x[:1, :128])
        state, params = flax.core.pop(nn.meta.unbox(boxed), "params")
    with jax.set_mesh(mesh), te.autocast(settings is not None, settings):

        def place(name: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(() if name == "gate_kernel" else ("ep",))))

        laid = {name: jax.device_put(value, place(name)) for name, value in params.items()}
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("ep")))

        def step(state: Any, params: Any, x: Any) -> Any:
            def loss(params: Any, state: Any, x: Any) -> Any:
                y, balance, _ = model.apply(
                    {"params": params, **state}, x, rngs={"sr_rng": jax.random.key(4)}
                )
                return (y.astype(jnp.float32) ** 2).mean() + balance

            gradients, following, dx = jax.grad(loss, argnums=(0, 1, 2))(params, state, x)
            return following, (gradients, dx)

        return milliseconds(jax.jit(step), state, laid, x)


def shorten_text(text: str, most: int = 400) -> str:
    """Shorten a text to its begin and end: XLA's error follows the traceback."""
    return text if len(text) <= most else f"{text[: most // 4]} .. {text[-3 * most // 4 :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to test the program itself"
    )
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--layer", action="store_true", help="the layer's rows alone")
    parser.add_argument("--devices", type=int, default=jax.device_count())
    options = parser.parse_args()
    devices = options.devices
    sizes, tokens, long, heads, mixture = LLAMA, TOKENS, LONG, (32, 8), QWEN3
    if options.quick:
        sizes, tokens, long, heads = {**LLAMA, **QUICK}, 128, 256, (4, 2)
        mixture = {"hidden": 256, "inner": 128, "experts": 8, "chosen": 2}
    rows: list[dict[str, Any]] = []
    one: dict[str, float] = {}

    def measure(name: str, what: str, devices: int, work: int, run: Callable[[], float]) -> None:
        try:
            row: dict[str, Any] = {"case": name, "layout": what, "eager_ms": round(run(), 3)}
            if devices == 1:
                one[name] = row["eager_ms"]
            # else the run on one device has failed, and there is nothing to compare with
            if name in one:
                row["speedup"] = round(work * one[name] / row["eager_ms"], 3)
        except Exception as error:
            # a layout that fails is a row of the file, and the next one runs
            row = {
                "case": name,
                "layout": what,
                "error": shorten_text(f"{type(error).__name__}: {error}"),
            }
        rows.append(row)
        machine = jax.devices()[0].device_kind
        options.json.write_text(
            json.dumps({"machine": machine, "jax": jax.__version__, "rows": rows}, indent=1)
        )
        print(row, flush=True)

    for name in options.recipe or ("bf16", "delayed"):
        for layout in layouts(devices):
            case = f"layer_fb/{name}/llama8b_s{tokens}"
            measure(
                case,
                layout.name,
                layout.devices,
                layout.sequences,
                lambda n=name, at=layout: layer(at, RECIPES[n], sizes, tokens),
            )
    if options.layer:
        return
    for name in options.recipe or ("bf16", "delayed"):
        case = f"experts_fb/{name}/qwen3_30b_a3b_t{tokens}"
        for count in (1, devices):
            measure(
                case,
                f"ep {count}",
                count,
                count,
                lambda n=name, d=count: experts(d, RECIPES[n], mixture, tokens),
            )
    case = f"dpa_fb/bf16/causal_b1_s{long}_h{heads[0]}_{heads[1]}_d128"
    for count, strategy in ((1, "DEFAULT"), (devices, "RING"), (devices, "ALL_GATHER")):
        measure(
            case,
            f"cp {count} {strategy}".lower(),
            count,
            1,
            lambda d=count, s=strategy: sequence(d, s, long, *heads),
        )


if __name__ == "__main__":
    main()

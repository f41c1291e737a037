"""Layer time and peak memory with and without offloading saved activations to the host.

    python benchmarks/offload.py [--json FILE] [--only TEXT]

A step is forward + backward through 8 layers, of which 6 are offloaded. Its lower time bound is the larger of two
times: the step without offloading, and the moved bytes, once in each direction, over the link's measured rate. Its
lower memory bound is the saved activations in layers that are not offloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from record import GPU, options, parser, select_cases, write

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine_tools.bench.measure import measure, peak_mib

BF16 = torch.bfloat16
LAYERS, OFFLOADED, TOKENS, WIDTH = 8, 6, 8192, 4096
MIB = 2**20
RECIPES: dict[str, recipes.Recipe | None] = {
    "bf16": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
}


class Case(NamedTuple):
    """One layer type under one recipe."""

    name: str
    make: Callable[[], torch.nn.Module]
    recipe: recipes.Recipe | None


def main() -> None:
    chosen = options(parser(__doc__))
    rate = link_rate()
    print(f"link: {rate / 1e9:.1f} GB/s to the host and back")
    print(
        f"{'case':32} {'plain ms':>9} {'ms':>9} {'of floor':>9} {'plain MiB':>10} {'MiB':>9} {'moved MiB':>10}"
    )
    rows = []
    for case in select_cases(cases(), chosen.only):
        layers = [case.make() for _ in range(LAYERS)]
        plain = step(layers, case.recipe, contextlib.nullcontext(), lambda y: y)
        context, synchronize, *_ = te.get_cpu_offload_context(True, OFFLOADED, LAYERS)
        moving = step(layers, case.recipe, context, synchronize)
        row = {
            "case": case.name,
            "link_gb_s": rate / 1e9,
            "moved_mib": count_offload_bytes(context, moving) / MIB,
        }
        for name, call in (("plain", plain), ("offloaded", moving)):
            row[f"{name}_ms"] = measure(call, GPU).eager_ms
            row[f"{name}_peak_mib"] = peak_mib(call, GPU)
        row["floor_ms"] = max(row["plain_ms"], 2e3 * row["moved_mib"] * MIB / rate)
        rows.append(row)
        print(
            f"{case.name:32} {row['plain_ms']:9.2f} {row['offloaded_ms']:9.2f} "
            f"{row['offloaded_ms'] / row['floor_ms']:9.2f} {row['plain_peak_mib']:10.0f} "
            f"{row['offloaded_peak_mib']:9.0f} {row['moved_mib']:10.0f}",
            flush=True,
        )
    write(chosen.json, cases=rows)


def cases() -> Iterator[Case]:
    for name, recipe in RECIPES.items():
        yield Case(
            f"{name} linear", lambda: te.Linear(WIDTH, WIDTH, bias=False, params_dtype=BF16), recipe
        )
        yield Case(
            f"{name} layernorm_mlp",
            lambda: te.LayerNormMLP(WIDTH, 4 * WIDTH, params_dtype=BF16),
            recipe,
        )
        yield Case(f"{name} layer", _layer, recipe)


def _layer() -> torch.nn.Module:
    return te.TransformerLayer(
        WIDTH,
        4 * WIDTH,
        WIDTH // 128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=BF16,
    )


def step(layers, recipe, context, synchronize) -> Callable[[], None]:
    """Forward and backward; every gradient is newly allocated."""
    x = torch.randn(TOKENS, 1, WIDTH, device=GPU, dtype=BF16, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]

    def run() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = through(layers, x, context, synchronize)
        y.backward(torch.ones_like(y))

    return run


def through(layers, y, context, synchronize) -> torch.Tensor:
    """layers(y), each in the context."""
    for layer in layers:
        with context:
            y = layer(y)
        y = synchronize(y)
    return y


def count_offload_bytes(context, call: Callable[[], None]) -> float:
    """Bytes that one step copies to the host."""
    total = 0
    states = context.offload_synchronizer.layer_states.values()
    starts = {id(state): state.start_offload for state in states}

    def count_calls(state):
        def start() -> None:
            nonlocal total
            total += sum(values.nbytes for values in state.fwd_gpu_tensor_group.tensor_list)
            starts[id(state)]()

        return start

    for state in states:
        state.start_offload = count_calls(state)
    call()
    for state in states:
        del state.start_offload
    return total


def link_rate() -> float:
    """Bytes per second for 256 MiB copies between the GPU and pinned memory, in the slower direction."""
    device = torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    times = [
        measure(lambda: host.copy_(device, non_blocking=True), GPU).gpu_ms,
        measure(lambda: device.copy_(host, non_blocking=True), GPU).gpu_ms,
    ]
    return device.numel() / max(ms for ms in times if ms is not None) * 1e3


if __name__ == "__main__":
    main()

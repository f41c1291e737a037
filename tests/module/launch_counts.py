"""Print {layer and recipe: counts} of the launches of a warm forward and backward pass, on a simulated H200.

Counts are kernels of this package, products, and operations of torch that would launch a kernel. The attention of a
TransformerLayer is a function without launches.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host_calls
import pretended_gpu

import transformer_engine.pytorch as te
from transformer_engine.common.kernels import launch as launches
from transformer_engine.pytorch.primitives.gemm import cublaslt_library

LAYERS = {
    "linear": host_calls._linear,
    "layernorm_linear": host_calls._layernorm_linear,
    "layernorm_mlp": host_calls._mlp,
    "layer": host_calls._layer,
}
WARM = 6  # calls before the counted one: passes are compiled by then
# Operations of torch that launch one kernel each; others that occur call these.
LAUNCHING = ("add", "add_", "cat", "copy_", "div", "fill_", "mul", "mul_", "sum")

counts: collections.Counter[str] = collections.Counter()


def kernel(*_: Any) -> None:
    counts["kernels"] += 1


def product(*_: Any) -> None:
    counts["products"] += 1


def pretend() -> None:
    pretended_gpu.pretend()
    middle = (0, 0, False, False, None, None, None, None, None, None)

    def compiled(launch: Any, tensors: Any) -> Any:
        arguments = (*launch.scalars, *launch.constants)
        return launches.Handle(kernel, launch.grid, lambda device: 0, middle, arguments)

    launches._compile = compiled
    cublaslt_library.bindings().matmul = product


def counted(name: str, recipe: str) -> dict[str, int]:
    """Launches of one warm step of a layer."""
    if name == "layer":
        te.DotProductAttention.forward = host_calls._attention
    work = host_calls.passes(LAYERS[name], host_calls.RECIPES[recipe](), True)
    for _ in range(WARM):
        work()
    counts.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    for event in profile.events():
        if event.name.removeprefix("aten::") in LAUNCHING:
            counts[event.name.removeprefix("aten::")] += 1
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    pretend()
    print(
        json.dumps(
            {f"{name}/{recipe}": counted(name, recipe) for name in LAYERS for recipe in host_calls.RECIPES}
        )
    )

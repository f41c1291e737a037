"""Print {layer and recipe: launch counts} for a warm forward and backward pass, on a simulated H200.

The counts are this package's kernels, products, and torch operations that would launch a kernel. A
TransformerLayer's attention is a backend without launches, which like cuDNN writes its gradients into given
tensors.

layer            one weight for queries, keys and values, without rotary embedding
rotary_layer     the same with rotary embedding
separate_layer   three weights, with rotary embedding
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

from transformer_engine.common.kernels import launch as launches
from transformer_engine.pytorch.attention import RotaryPositionEmbedding
from transformer_engine.pytorch.primitives.attention.call import Attended, Gradients
from transformer_engine.pytorch.primitives.attention.passes import Passes
from transformer_engine.pytorch.primitives.gemm import cublaslt_library


def _separate_layer() -> torch.nn.Module:
    return host_calls._layer(fused=False, groups=2)


LAYERS = {
    "linear": host_calls._linear,
    "layernorm_linear": host_calls._layernorm_linear,
    "layernorm_mlp": host_calls._mlp,
    "layer": host_calls._layer,
    "rotary_layer": host_calls._layer,
    "separate_layer": _separate_layer,
}
WARM = 6  # calls before the counted one: passes are compiled by then
# Torch operations that launch one kernel each; other operations call these.
LAUNCHING = ("add", "add_", "cat", "copy_", "div", "fill_", "mul", "mul_", "sum")

counts: collections.Counter[str] = collections.Counter()


def kernel(*_: Any) -> None:
    counts["kernels"] += 1


def product(*_: Any) -> None:
    counts["products"] += 1


def attend(call: Any, inputs: Any) -> Attended:
    q = inputs.q
    return Attended(q.new_empty((*q.shape[:-1], call.head_dim_v)), q.new_empty(1))


def differentiate(
    call: Any, inputs: Any, attended: Any, grad_output: Any, into: Any = None
) -> Gradients:
    return Gradients(
        *([torch.empty(x.shape, dtype=x.dtype) for x in inputs[:3]] if into is None else into)
    )


def pretend() -> None:
    pretended_gpu.pretend()
    middle = (0, 0, False, False, None, None, None, None, None, None)

    def compiled(launch: Any, tensors: Any) -> Any:
        arguments = (*launch.scalars, *launch.constants)
        return launches.Handle(kernel, launch.grid, lambda device: 0, middle, arguments)

    launches._compile = compiled
    pretended_gpu.everywhere(
        "choose", lambda call: Passes("none", attend, differentiate, differentiate)
    )
    cublaslt_library.bindings().matmul = product


def launch_counts(name: str, recipe: str) -> dict[str, int]:
    """Launches in one warm step of a layer."""
    options: dict[str, Any] = {}
    if name in ("rotary_layer", "separate_layer"):
        options["rotary_pos_emb"] = RotaryPositionEmbedding(host_calls.WIDTH // 4)(host_calls.ROWS)
    work = host_calls.passes(LAYERS[name], host_calls.RECIPES[recipe](), True, **options)
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
            {
                f"{name}/{recipe}": launch_counts(name, recipe)
                for name in LAYERS
                for recipe in host_calls.RECIPES
            }
        )
    )

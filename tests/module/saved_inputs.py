"""Print {layer: shapes} of the inputs that a compiled backward pass checks for changed memory, on a simulated H200."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host_calls
import pretended_gpu

from transformer_engine.pytorch.fast import compiled

LAYERS = {
    "linear": host_calls._linear,
    "layernorm_linear": host_calls._layernorm_linear,
    "layernorm_mlp": host_calls._mlp,
}

run_backward = compiled.CompiledLayer.backward
shapes: list[list[int]] = []


def watched(self: Any, ctx: Any, inputs: list[Any], grads: int, spec: Any) -> tuple[Any, ...]:
    shapes[:] = [list(inputs[i].shape) for i in ctx.kind.input_results]
    return run_backward(self, ctx, inputs, grads, spec)


if __name__ == "__main__":
    pretended_gpu.pretend()
    compiled.CompiledLayer.backward = watched
    found = {}
    for name, build in LAYERS.items():
        work = host_calls.passes(build, None, True)
        for _ in range(6):
            work()
        found[name] = [*shapes]
    print(json.dumps(found))

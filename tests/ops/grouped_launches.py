"""Print the kernels in one step of a grouped linear layer for each recipe, on a simulated GPU.

{recipe: {way: names of kernels and products in order}}; see `benchmarks/pretended_gpu.py`. A way is "module" or "ops"
and a group count, as in "ops 8". The entry "loop" has the products from an unquantized loop over 8 groups.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pretended_gpu

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.kernels import launch as launches
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.primitives.gemm import cublaslt_library
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}
ROWS, WIDTH = 1024, 128
started: list[str] = []


def count() -> None:
    """Append the name of every launched kernel and product to `started`."""

    def compiled(launch: Any, tensors: Any) -> Any:
        name = launch.kernel.fn.__name__
        return launches.Handle(
            lambda *arguments: started.append(name),
            launch.grid,
            lambda device: 0,
            (0, 0, False, False, None, None, None, None, None, None),
            (*launch.scalars, *launch.constants),
        )

    launches._compile = compiled
    library: Any = cublaslt_library.bindings()
    library.matmul = lambda *arguments: started.append("cublaslt")


def kernels(way: str, groups: int, recipe: Any) -> list[str]:
    """Kernels and products in a warm step, a layer's second, whose groups have other sizes."""
    FP8GlobalStateManager.reset()
    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = "0" if way == "loop" else "1"
    if way == "module":
        layer: Any = te.GroupedLinear(
            groups, WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cpu"
        )
    else:
        layer = ops.GroupedLinear(groups, WIDTH, WIDTH, dtype=torch.bfloat16, device="cpu")
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    other = ROWS - 128 * (groups - 1)
    for splits in ([ROWS // groups] * groups, [other, *[128] * (groups - 1)]):
        started.clear()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, splits if way == "module" else torch.tensor(splits))
        y.backward(dy)
    return list(started)


if __name__ == "__main__":
    pretended_gpu.pretend()
    count()
    ways = [("module", 8), ("ops", 2), ("ops", 8)]
    print(
        json.dumps(
            {
                name: {f"{way} {groups}": kernels(way, groups, recipe) for way, groups in ways}
                for name, recipe in RECIPES.items()
            }
            | {"loop": kernels("loop", 8, None)}
        )
    )

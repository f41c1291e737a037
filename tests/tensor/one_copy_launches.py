"""Print a TransformerLayer's products and casts on a simulated GPU, with a passed self-test or not, as JSON.

    python -m tests.tensor.one_copy_launches 10.0 [passed]

{recipe: {"transposed": count of kernels that write codes and their transpose, "products": backends}}.
"""

from __future__ import annotations

import json
import sys

from tests.primitives import hardware_layers
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.runtime import self_tested

PATH = "fp8 products in all layouts"
LAYER = "TransformerLayer, RMSNorm, SwiGLU"


def main(arguments: list[str]) -> None:
    simulation = hardware_layers.simulation(arguments)
    self_tested._read_stored = lambda index: {PATH: "passed" in arguments}
    results = {}
    for name, make in {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
    }.items():
        simulation.launches.clear()
        passes = hardware_layers.step(LAYER, make())
        transposed = 0
        for recorded in simulation.launches.values():
            outputs = recorded.kinds[recorded.launch.inputs :]
            transposed += (
                sum(
                    kind is not None and str(kind[0]).startswith("torch.float8") for kind in outputs
                )
                > 1
            )
        products = sorted({passes[each]["gemm"] for each in passes})
        results[name] = {
            "transposed": transposed,
            "products": products,
            "launches": len(simulation.launches),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Print {random layer: differences} between the plain passes and the generated passes, on a simulated GPU.

    python tests/module/generated_random_launches.py COUNT

`generated_launches.py` describes the comparison. The layers come from `test_random_layers.py`, in bfloat16
and under the recipes whose kernels the simulated GPU has. Hypothesis draws them, the same ones in every run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from hypothesis import given, settings

import transformer_engine.pytorch as te
from tests.module import generated_launches as launches
from tests.module import test_random_layers
from tests.module.test_random_layers import EACH, Settings, random_settings
from transformer_engine.common.dispatch import observing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

STEPS = launches.COMPILED + 2
# For other values, the simulated GPU has no kernels or products, or passes have effects that are not
# compiled.
CHOICES: dict[str, list[Any]] = {
    "kind": ["Linear", "LayerNormLinear", "LayerNormMLP"],
    "recipe": ["none", "delayed", "current", "block"],
    "override": [None],
    "dtype": [torch.bfloat16],
    "quantized": [False],
    "fused": [False],
}


def step(case: Settings, layer: Any, number: int) -> dict[str, Any]:
    """Symbols for the results, gradients and scaling states in one step."""
    x, recipe = case.sample(number, torch.device("cpu")), case.made_recipe()
    states = launches.name_inputs(layer, x)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **({"is_first_microbatch": number == 0} if case.microbatches else {}))
    return launches.symbols(layer, x, y[0] if isinstance(y, tuple) else y, states)


def difference(case: Settings) -> tuple[str | None, int]:
    """What a generated pass computes differently, or None; and the number of generated passes."""
    FP8GlobalStateManager.reset()
    layer = case.layer(torch.device("cpu"))
    for number in range(STEPS):
        actual = step(case, layer, number)
    passes = sum(launches.compiled_passes(layer))
    with observing(lambda operation, request: None):  # runs the plain passes
        expected = step(case, layer, STEPS)
    actual = step(case, layer, STEPS + 1)
    # A result that no kernel or product has computed has no symbol.
    unlike = [name for name in expected if actual[name] != expected[name] or expected[name] == "?"]
    return (f"{unlike}" if unlike else None), passes


def main() -> None:
    launches.pretend()
    test_random_layers.SIZES = (256, 256, 128)  # blocks of 128 also in weight gradients
    results: dict[str, str] = {}
    generated = drawn = 0

    @settings(EACH, max_examples=int(sys.argv[1]))
    @given(case=random_settings(**CHOICES))
    def compare(case: Settings) -> None:
        nonlocal generated, drawn
        unlike, passes = difference(case)
        drawn, generated = drawn + 1, generated + passes
        if unlike is not None:
            results[str(case)] = unlike

    compare()
    print(json.dumps({"drawn": drawn, "generated": generated, "different": results}))


if __name__ == "__main__":
    main()

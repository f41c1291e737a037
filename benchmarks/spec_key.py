"""Measure a warm call's cost if spec equality were the key: `python benchmarks/spec_key.py`.

A layer finds a call's spec by the facts from which the spec is built (`Call` in `module/specs.py`). With the spec
itself as the key, every call would have to build it first. The script times the look-up and the parts of the
construction for an FP8 Linear on a CPU, in microseconds of CPU time (best of seven runs). The constructor and the hash
alone are a lower bound of the cost: they remain if every rule of the builder takes no time.
"""

from __future__ import annotations

import dataclasses
import json
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.functions.linear_spec import LinearSpec
from transformer_engine.pytorch.module import linear, specs
from transformer_engine.pytorch.module.arguments import CallSwitches


def microseconds(function: Callable[[], Any], calls: int) -> float:
    """CPU time per call, the best from seven runs."""
    return round(
        min(timeit.repeat(function, timer=time.process_time, number=calls, repeat=7)) / calls * 1e6,
        2,
    )


def main() -> None:
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    recipe = recipes.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        layer(x)
        (key,) = layer._specs
        spec = layer._specs[key]
        settings = {
            field.name: getattr(spec, field.name) for field in dataclasses.fields(LinearSpec)
        }
        equal = LinearSpec(**settings)
        tensors, switches = (layer.weight, layer.bias), CallSwitches()
        figures = {
            "look-up by an equal key": microseconds(lambda: layer._specs[(*key,)], 50_000),
            "key and look-up (ProductsModule.spec)": microseconds(
                lambda: layer.spec(x, tensors, switches), 5_000
            ),
            "construction by all rules (build)": microseconds(
                lambda: specs.build_from_key(linear.Linear.build, key), 500
            ),
            "constructor of LinearSpec alone": microseconds(lambda: LinearSpec(**settings), 5_000),
            "hash of a LinearSpec": microseconds(lambda: hash(spec), 20_000),
            "comparison of equal specs": microseconds(lambda: spec == equal, 20_000),
        }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

"""Run flash-linear-attention in Triton's interpreter, compare with float64, print {case: largest error} as JSON.

The interpreter has no bfloat16 products, loop counters without tensor methods, and no timer for tuning.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from triton.runtime.autotuner import Autotuner

from tests.attention.linear_attention_cases import (
    Case,
    error,
    operation_inputs,
    reference_results,
    run_with_gradients,
)
from transformer_engine.pytorch.attention.linear_attention.inputs import CallLayout, batch_first
from transformer_engine.pytorch.primitives.linear_attention import fla as backend
from transformer_engine.pytorch.primitives.linear_attention import request

RULES = {"gdn": request.Rule.GDN, "gdn2": request.Rule.GDN2, "gdp": request.Rule.GDP}
NAMES = {"query_layer": "q", "key_layer": "k", "value_layer": "v"}
OPTIONS = {
    "output_final_state": request.Option.FINAL_STATE,
    "use_qk_l2norm_in_kernel": request.Option.L2_NORM,
    "use_beta_sigmoid_in_kernel": request.Option.SIGMOID,
    "safe_gate": request.Option.SAFE_GATE,
}
HALF: dict[str, Any] = {
    "dtype": torch.float16,
    "gate_dtype": torch.float32,
    "sizes": (16, 16),
    "heads": 1,
}
CASES = {
    "gated delta net": Case(
        "gdn",
        lengths=(70,),
        options={"output_final_state": True, "use_qk_l2norm_in_kernel": True},
        **HALF,
    ),
    "gated delta net, packed": Case(
        "gdn", "thd", lengths=(3, 0, 66), padding=5, options={"output_final_state": True}, **HALF
    ),
    "gated delta net 2, packed": Case(
        "gdn2", "thd", lengths=(3, 0, 18), padding=4, options={"output_final_state": True}, **HALF
    ),
    "gated delta product": Case(
        "gdp",
        lengths=(36,),
        updates=2,
        options={"output_final_state": True, "safe_gate": True, "use_beta_sigmoid_in_kernel": True},
        **HALF,
    ),
    "gated delta product, packed": Case(
        "gdp",
        "thd",
        lengths=(3, 0, 33),
        updates=2,
        padding=4,
        options={"output_final_state": True},
        **HALF,
    ),
}


class _Counter(int):
    """A loop counter; kernels convert their own."""

    def to(self, dtype: Any) -> _Counter:
        return self


def _counters(*bounds: Any) -> Any:
    return (_Counter(i) for i in builtins.range(*(bound.__index__() for bound in bounds)))


def prepare() -> None:
    """Adapt all imported modules' kernels to the interpreter."""
    for path in ("gated_delta_product", "gated_delta_rule", "gdn2"):
        importlib.import_module(f"fla.ops.{path}")
    Autotuner._bench = lambda self, *args, config, **options: [0.0, 0.0, 0.0]
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops") and hasattr(module, "tl"):
            module.range = _counters  # pyright: ignore[reportAttributeAccessIssue]


def largest_error(case: Case) -> float:
    """Largest relative error among output, state and gradients."""
    tensors = case.tensors()
    bounds = case.bounds()
    layout = CallLayout(case.format, case.tokens, case.heads, *case.sizes)
    options = tuple(OPTIONS[name] for name, value in case.options.items() if value)
    spec = request.DeltaSpec(RULES[case.rule], (case.sizes[0] ** -0.5).hex(), options)

    def call(**kwargs: torch.Tensor) -> Any:
        inputs = {NAMES.get(name, name): x for name, x in kwargs.items()}
        packed = batch_first(layout, operation_inputs(**inputs, cu_seqlens=bounds))
        output, state = backend.run(packed, spec)
        return layout.output(output), state

    actual, gradients = run_with_gradients(case, tensors, call)
    exact = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    expected, wanted_gradients = run_with_gradients(
        case, exact, lambda **x: reference_results(case, x)
    )
    pairs = [*zip(actual, expected, strict=True), *zip(gradients, wanted_gradients, strict=True)]
    return max(error(x, y) for x, y in pairs)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    prepare()
    print(json.dumps({name: largest_error(case) for name, case in CASES.items()}))

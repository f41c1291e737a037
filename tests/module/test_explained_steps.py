"""`explain(layer, x, steps=True)` reports every executed step: results, backends, saved buffers."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import LAYERS, RECIPES, sample
from transformer_engine.pytorch.functions.layer import runners
from transformer_engine.pytorch.quantization import emulate


def explain_steps(layer: torch.nn.Module, x: torch.Tensor, recipe: str | None = None, **options):
    chosen = None if recipe is None else RECIPES[recipe]
    with emulate(), te.autocast(enabled=chosen is not None, recipe=chosen):
        return te.explain(layer, x, steps=True, **options)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("kind", LAYERS)
def test_both_passes_of_a_layer_are_reported(kind, recipe):
    layer = LAYERS[kind](device="cpu")
    forward, backward = explain_steps(layer, sample("cpu"), recipe).passes
    assert forward.name.startswith("forward pass") and backward.name.startswith("backward pass")
    assert forward.saved and not backward.saved
    for report in (*forward.steps, *backward.steps):
        assert report.results and all("[" in result for result in report.results)
    results = " ".join(result for report in backward.steps for result in report.results)
    assert "dw " in results and "dx " in results


def test_a_step_names_its_backend_and_code_format():
    (forward,) = explain_steps(
        te.Linear(32, 32, device="cpu"), torch.randn(16, 32), "current", backward=False
    ).passes
    text = str(forward)
    assert (
        "x_rows float8 [16, 32]" in text
        and "quantize: reference" in text
        and "gemm: reference" in text
    )


def test_steps_are_reported_on_request_only():
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32)
    assert te.explain(layer, x).passes == ()
    assert explain_steps(layer, x).passes and not runners


def test_both_passes_of_a_chain_are_reported():
    chain = te.ops.Sequential(
        te.ops.LayerNorm(64), te.ops.Linear(64, 96), te.ops.GELU(), te.ops.Linear(96, 64)
    ).cpu()
    forward, backward = explain_steps(chain, sample("cpu"), "current").passes
    assert (forward.name, backward.name) == (
        "forward pass of Sequential",
        "backward pass of Sequential",
    )
    assert forward.saved and not backward.saved
    text = str(forward) + str(backward)
    assert "norm: " in text and "activation: " in text and "gemm: " in text
    assert "dw " in text and "dx " in text

"""NVTE_FP8_AUTO: layers too small to benefit from FP8 run unquantized; the explanation states the precision."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.functions import precision
from transformer_engine.pytorch.ops.basic import basic_linear
from transformer_engine.pytorch.quantization import emulate

RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
SMALL, LARGE = (128, 1024, 1024), (8192, 4096, 14336)


@pytest.mark.parametrize("kind", RECIPES)
def test_only_small_layers_run_unquantized_and_only_on_request(monkeypatch, kind):
    for variable, expected in (("0", True), ("1", False)):
        monkeypatch.setenv("NVTE_FP8_AUTO", variable)
        assert precision.quantizes(RECIPES[kind], *SMALL) is expected
        assert precision.quantizes(RECIPES[kind], *LARGE)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_explanation_reports_the_cost_of_quantizing(kind):
    quantized, unquantized = precision.TABLE.explain(
        precision.PrecisionRequest(*SMALL, kind, False)
    )
    assert quantized.chosen and "NVTE_FP8_AUTO=1" in str(unquantized.reason)
    quantized, unquantized = precision.TABLE.explain(precision.PrecisionRequest(*SMALL, kind, True))
    assert unquantized.chosen and "costs about" in str(quantized.reason)


def test_auto_precision_does_not_change_recipes_without_measurements(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_AUTO", "1")
    assert precision.quantizes(MXFP8BlockScaling(), *SMALL)


@pytest.mark.gpu
def test_a_small_layer_under_auto_computes_as_without_a_recipe(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_AUTO", "1")
    layer = te.Linear(1024, 1024, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device="cuda")
    with te.autocast(recipe=RECIPES["current"]):
        quantized = layer(x)
        explanation = te.explain(layer, x, backward=False)
    assert torch.equal(quantized, layer(x))
    assert "precision: high_precision" in str(explanation)


@pytest.mark.parametrize("kind", ["BasicLinear", "Linear"])
def test_te_ops_follow_nvte_fp8_auto_as_modules_do(monkeypatch, kind):
    """The variable depends on times measured on a GPU; this test replaces the measurement."""
    monkeypatch.setattr(precision, "reason_against_fp8", lambda *request: "it never pays")
    monkeypatch.setattr(
        basic_linear, "estimates", lambda device, traced, quantized_weight: not traced
    )
    layer = getattr(te.ops, kind)(64, 32, dtype=torch.bfloat16, device="cpu")
    model = te.ops.Sequential(layer, te.ops.ReLU())
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def output(recipe) -> torch.Tensor:
        with emulate(), te.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    unquantized, quantized = output(None), output(RECIPES["current"])
    assert not torch.equal(unquantized, quantized)
    monkeypatch.setenv("NVTE_FP8_AUTO", "1")
    assert torch.equal(output(RECIPES["current"]), unquantized)
    monkeypatch.delenv("NVTE_FP8_AUTO")
    assert torch.equal(output(RECIPES["current"]), quantized)


def test_calls_on_a_cpu_are_not_estimated():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert precision.estimates(gpu, traced=False, quantized_weight=False)
    assert not precision.estimates(cpu, traced=False, quantized_weight=False)
    assert not precision.estimates(gpu, traced=True, quantized_weight=False)
    assert not precision.estimates(gpu, traced=False, quantized_weight=True)

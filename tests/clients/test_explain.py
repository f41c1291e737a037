"""te.explain reports which backend ran and why the others did not."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import dispatch
from transformer_engine.common.recipe import Float8CurrentScaling


def layer_and_input(device):
    layer = te.Linear(64, 32, device=device, params_dtype=torch.bfloat16)
    return layer, torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)


def test_every_product_of_a_training_step_is_explained(device):
    layer, x = layer_and_input(device)
    with te.autocast(recipe=Float8CurrentScaling()):
        explanation = te.explain(layer, x)
    products = [d for d in explanation.decisions if d.operation == "gemm"]
    assert sum(d.count for d in products) == 3
    assert sum(d.count for d in explanation.decisions if d.operation == "quantize") == 3
    for decision in explanation.decisions:
        assert decision.chosen in dispatch.tables[decision.operation].names()
        assert all(verdict.chosen or len(verdict.reason) > 10 for verdict in decision.verdicts)


def test_the_text_names_the_choice_and_each_rejection(device):
    layer, x = layer_and_input(device)
    explanation = te.explain(layer, x, backward=False)
    (decision,) = (d for d in explanation.decisions if d.operation == "gemm")
    text = str(explanation)
    assert text.splitlines()[0].startswith(f"gemm: {decision.chosen} (1x)")
    assert "    not scaled_mm: an operand is not quantized" in text.splitlines()


def test_explain_leaves_no_gradients_and_no_observers(device):
    layer, x = layer_and_input(device)
    te.explain(layer, x)
    assert x.grad is None and layer.weight.grad is None
    assert dispatch._observers == []


def test_a_forced_backend_shows_as_the_reason(device):
    layer, x = layer_and_input(device)
    with te.use_backend(gemm="reference"):
        explanation = te.explain(layer, x, backward=False)
    assert explanation.decisions[0].chosen == "reference"
    assert "use_backend(gemm='reference') is in force" in str(explanation)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNorm, te.TransformerLayer])
def test_class_in_place_of_a_module_raises_what_to_construct(kind):
    with pytest.raises(
        TypeError, match=f"function is the class {kind.__name__}.*construct the module first"
    ):
        te.explain(kind, torch.zeros(2, 16))


def test_construction_of_a_module_can_be_explained():
    assert te.explain(te.Linear, 16, 16, device="cpu") is not None

"""Factories for custom recipes: each mirrors the recipe with the same name bit for bit."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.custom_recipes import quantizer_factories as factories

RECIPES = {
    "delayed_scaling_factory": recipe.DelayedScaling,
    "current_scaling_factory": recipe.Float8CurrentScaling,
    "float8_block_scaling_factory": recipe.Float8BlockScaling,
    "mxfp8_factory": recipe.MXFP8BlockScaling,
    "nvfp4_factory": recipe.NVFP4BlockScaling,
    "high_precision_factory": None,
}


def train_two_passes(device, layer_of, used):
    """Outputs and gradients from two passes."""
    torch.manual_seed(5)
    layer = layer_of(device)
    records = []
    for _ in range(2):
        x = torch.randn(128, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
        with te.autocast(enabled=used is not None, recipe=used):
            y = layer(x)
        y.float().square().sum().backward()
        records += [y, x.grad, *(p.grad.clone() for p in layer.parameters())]
    return records


LAYERS = {
    "Linear": lambda device: te.Linear(128, 128, params_dtype=torch.bfloat16, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(
        128, 256, params_dtype=torch.bfloat16, device=device
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_factory_gives_the_bits_of_its_recipe(device, layer, name, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    built_in = RECIPES[name]
    custom = recipe.CustomRecipe(qfactory=getattr(factories, name))
    expected = train_two_passes(device, LAYERS[layer], None if built_in is None else built_in())
    for got, reference in zip(
        train_two_passes(device, LAYERS[layer], custom), expected, strict=True
    ):
        assert torch.equal(got, reference)


@pytest.mark.parametrize("name", RECIPES)
def test_every_call_makes_a_quantizer_and_no_role_means_an_input(name):
    factory = getattr(factories, name)
    of_input = te.QuantizerRole("linear", "input", "decoder.0")
    assert factory(None) == factory(of_input) == factory("linear_input")
    if name != "delayed_scaling_factory":
        assert factory(of_input) is not factory(of_input)


@pytest.mark.parametrize("role", [te.QuantizerRole("linear", "grad_output"), "linear_grad_output"])
def test_gradients_are_e5m2_under_current_scaling(role):
    assert factories.current_scaling_factory(role).dtype == te.DType.kFloat8E5M2
    assert factories.current_scaling_factory("linear_weight").dtype == te.DType.kFloat8E4M3

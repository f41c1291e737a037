"""Writes in place to the results of layers under torch.compile, whose gradients equal those in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "high-precision": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}


def converted(recipe: recipes.Recipe | None) -> nn.Module:
    return te.convert(nn.Sequential(nn.Linear(32, 32)), recipe, verbose=False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64),
    "LayerNorm": lambda: te.LayerNorm(32),
    "RMSNorm": lambda: te.RMSNorm(32),
    "ops.Linear": lambda: te.ops.Sequential(te.ops.Linear(32, 32)),
    "ops.RMSNorm": lambda: te.ops.Sequential(te.ops.RMSNorm(32)),
    "ops chain": lambda: te.ops.Sequential(
        te.ops.Linear(32, 64), te.ops.GELU(), te.ops.Linear(64, 32)
    ),
}


class AddedInput(nn.Module):
    """layer(x) * 2 + x, whose multiplication and sum write to the layer's result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        y = self.layer(x, *args)
        y.mul_(2.0)
        y += x
        return y


def results(model: nn.Module, x: Tensor, *args: Tensor) -> list[Tensor]:
    """Result, and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    y = model(x, *args)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


def check_writes(
    layer: nn.Module, backend: str, *shape: int, args: tuple[Tensor, ...] = ()
) -> None:
    """Compare compiled and eager results, for an input with requires_grad."""
    torch._dynamo.reset()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    model = AddedInput(layer)
    expected = results(copy.deepcopy(model), x, *args)
    model.compile(backend=backend, fullgraph=True)
    found = results(model, x, *args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(32, 32), (2, 16, 32)], ids=["matrix", "batch"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_writes_to_results_of_converted_layers_compile(recipe, shape):
    check_writes(converted(recipe()), "aot_eager", *shape)


def test_writes_to_results_with_padded_rows_compile():
    check_writes(converted(recipes.Float8CurrentScaling()), "aot_eager", 5, 32)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_writes_to_results_of_layers_compile(layer, backend):
    check_writes(layer(), backend, 2, 16, 32)


def test_writes_to_results_of_grouped_layers_compile():
    splits = torch.tensor([16, 16])
    check_writes(te.GroupedLinear(2, 32, 32), "aot_eager", 32, 32, args=(splits,))


def test_activations_write_in_place_after_converted_layers():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32))
    check_writes(
        te.convert(model, recipes.Float8CurrentScaling(), verbose=False), "aot_eager", 32, 32
    )

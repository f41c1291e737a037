"""Layers accept a quantized tensor in place of its values, with the same results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES

ROWS, HIDDEN = 128, 128
LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **options: te.Linear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(HIDDEN, HIDDEN, **options),
    "LayerNormLinear with RMSNorm": lambda **options: te.LayerNormLinear(
        HIDDEN, HIDDEN, normalization="RMSNorm", **options
    ),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options),
    "LayerNorm": lambda **options: te.LayerNorm(HIDDEN, **options),
    "RMSNorm": lambda **options: te.RMSNorm(HIDDEN, **options),
    "TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, **options
    ),
}
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "current": lambda: te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "mxfp8": lambda: te.MXFP8Quantizer(torch.float8_e4m3fn),
}


def layer_results(layer: torch.nn.Module, x: Any, recipe: str) -> tuple[torch.Tensor, ...]:
    layer.zero_grad()
    with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        y = layer(x)
    y.sum().backward()
    return (y.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None])


@pytest.mark.parametrize("position", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantized_input_equals_its_dequantized_values(kind, recipe, quantizer, position):
    if kind == "Linear" and recipe != "none":
        pytest.skip(
            "a Linear multiplies the codes of its input, which another quantization would round again"
        )
    torch.manual_seed(3)
    layer = LAYERS[kind](device=position)
    shape = (ROWS, 1, HIDDEN) if kind == "TransformerLayer" else (ROWS, HIDDEN)
    codes = QUANTIZERS[quantizer]()(torch.randn(*shape, device=position))
    values = codes.dequantize().detach().requires_grad_()
    expected = layer_results(layer, values, recipe)
    actual = layer_results(layer, codes.requires_grad_(), recipe)
    for a, b in zip(actual, expected, strict=True):
        # Now and then, a recipe rounds values that differ in their last bits to different codes.
        assert (a - b).norm() <= (1e-5 if recipe == "none" else 1e-3) * b.norm()

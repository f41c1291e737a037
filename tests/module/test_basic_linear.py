"""ops.BasicLinear's passes equal te.Linear's: y = x @ w.T + b, dx = dy @ w, dw = dy.T @ x."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.ops import BasicLinear
from transformer_engine.pytorch.quantization import RecipeState

RECIPES = [Float8CurrentScaling(), DelayedScaling(), MXFP8BlockScaling()]


@pytest.fixture
def tensors(device):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 32, 64), "w": (96, 64), "b": (96,), "dy": (2, 32, 96)}
    result = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: value.to(device, torch.bfloat16) for name, value in result.items()}


def quantizers(recipe):
    forward = RecipeState.create(recipe, mode="forward", num_quantizers=2).make_quantizers()
    backward = RecipeState.create(recipe, mode="backward", num_quantizers=1).make_quantizers()
    return dict(
        zip(
            ("input_quantizer", "weight_quantizer", "grad_output_quantizer"),
            forward + backward,
            strict=True,
        )
    )


def test_passes_without_quantizers_equal_torch(tensors):
    x, w, b, dy = tensors.values()
    y, x_kept, w_kept = BasicLinear._functional_forward(x, w, bias=b)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, b))
    dx, dw = BasicLinear._functional_backward(dy, x_kept, w_kept)
    torch.testing.assert_close(dx, dy @ w)
    torch.testing.assert_close(dw, dy.flatten(0, 1).t() @ x.flatten(0, 1))
    assert (
        BasicLinear._functional_backward(dy, x_kept, w_kept, weight_requires_grad=False)[1] is None
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_passes_with_quantizers_equal_a_layer(recipe, tensors, emulated):
    x, w, b, dy = tensors.values()
    layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(b)
    leaf = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        expected = layer(leaf)
    expected.backward(dy)
    q = quantizers(recipe)
    dy_quantizer = q.pop("grad_output_quantizer")
    y, x_codes, w_codes = BasicLinear._functional_forward(
        x, w, bias=b, with_quantized_compute=True, **q
    )
    dx, dw = BasicLinear._functional_backward(
        dy, x_codes, w_codes, with_quantized_compute=True, grad_output_quantizer=dy_quantizer
    )
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, leaf.grad)
    torch.testing.assert_close(dw, layer.weight.grad)


def test_quantized_compute_without_a_quantizer_raises(tensors):
    with pytest.raises(ValueError, match="input_quantizer=None"):
        BasicLinear._functional_forward(tensors["x"], tensors["w"], with_quantized_compute=True)

"""Layers on the meta device compute shapes, dtypes and reports; scales and histories keep their values."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import BATCH, HEADS, HIDDEN, NAMES, RECIPES, TOKENS, make_call, make_layer
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling


def inputs(kind):
    """Call arguments on the meta device."""
    if kind == "GroupedLinear":
        half = TOKENS * BATCH // 2
        return torch.empty(2 * half, HIDDEN, device="meta", requires_grad=True), [half, half]
    if kind == "DotProductAttention":
        heads = (TOKENS, BATCH, HEADS, HIDDEN // HEADS)
        return tuple(torch.empty(heads, device="meta", requires_grad=True) for _ in range(3))
    return (torch.empty(TOKENS, BATCH, HIDDEN, device="meta", requires_grad=True),)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NAMES)
def test_meta_layer_computes_shapes_and_a_report(kind, recipe):
    args = inputs(kind)
    layer, real = (make_layer(kind, device=device) for device in ("meta", "cpu"))
    values = [
        x.new_zeros(x.shape, device="cpu") if isinstance(x, torch.Tensor) else x for x in args
    ]
    with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        assert str(te.explain(layer, *args))
        output = layer(*args)
        expected = real(*values)
    assert output.is_meta and output.shape == expected.shape and output.dtype == expected.dtype
    output.sum().backward()
    for tensor in (args[0], *layer.parameters()):
        assert tensor.grad.is_meta and tensor.grad.shape == tensor.shape


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
def test_fp8_attention_on_meta_computes_shapes(recipe):
    layer = te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, device="meta", params_dtype=torch.bfloat16
    )
    x = torch.empty(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with te.autocast(recipe=recipe(fp8_dpa=True)):
        output = layer(x)
    output.sum().backward()
    assert output.is_meta and output.shape == x.shape and output.dtype == x.dtype
    assert x.grad is not None and x.grad.is_meta


@pytest.mark.parametrize("calibrating", [False, True])
def test_meta_layer_records_no_maxima(calibrating):
    recipe = DelayedScaling(amax_history_len=4)
    layer = make_layer("Linear", device="meta")
    with te.autocast(enabled=not calibrating, calibrating=calibrating, recipe=recipe):
        layer(*inputs("Linear")).sum().backward()
    layer.to_empty(device="cpu")
    fresh = make_layer("Linear", device="cpu")
    layer.load_state_dict(fresh.state_dict())
    results = []
    for each in (layer, fresh):
        x, _ = make_call(each)
        with te.autocast(recipe=recipe):
            results.append(each(x))
        results[-1].sum().backward()
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"]
)
@pytest.mark.parametrize("meta", ["layer", "input"])
def test_layer_and_input_are_rejected_if_only_one_is_on_meta(kind, meta):
    layer = make_layer(kind, device="meta" if meta == "layer" else "cpu")
    x = torch.empty(TOKENS, BATCH, HIDDEN, device="cpu" if meta == "layer" else "meta")
    with pytest.raises(
        (RuntimeError, ValueError), match=r"on (the )?meta.*(move one|reset_parameters)"
    ):
        layer(x)

"""Layers with parts that a user replaced or removed."""

from __future__ import annotations

import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_call, make_layer


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("LayerNorm", "bias"),
        ("LayerNormLinear", "layer_norm_bias"),
        ("LayerNormMLP", "layer_norm_bias"),
    ],
)
def test_a_norm_whose_bias_was_removed_trains(name, bias):
    without, zero = make_layer(name), make_layer(name)
    setattr(without, bias, None)
    torch.nn.init.zeros_(getattr(zero, bias))
    results = []
    for layer in (without, zero):
        x, call = make_call(layer)
        y = call()
        y.sin().sum().backward()
        results.append([y, x.grad, *(p.grad for n, p in layer.named_parameters() if n != bias)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_projection_that_adds_its_bias_can_replace_one_that_returns_it():
    layer, other = make_layer("TransformerLayer"), make_layer("TransformerLayer")
    proj = other.self_attention.proj
    torch.nn.init.normal_(proj.bias)
    layer.load_state_dict(other.state_dict())
    local = te.Linear(proj.in_features, proj.out_features, device=proj.weight.device)
    local.load_state_dict(proj.state_dict())
    layer.self_attention.proj = local
    (_, ours), (_, reference) = make_call(layer), make_call(other)
    torch.testing.assert_close(ours(), reference(), rtol=1e-5, atol=1e-5)


def test_a_layer_warns_once_that_it_runs_in_high_precision():
    layer = make_layer("Linear")
    with warnings.catch_warnings(record=True) as observed:
        warnings.simplefilter("always")
        for rows in (7, 9, 11):
            with te.autocast(recipe=RECIPES["mxfp8"]):
                layer(torch.randn(rows, layer.in_features, device=layer.weight.device))
    assert (
        len(
            [
                w
                for w in observed
                if "Linear runs in high precision, not under MXFP8BlockScaling" in str(w.message)
            ]
        )
        == 1
    )

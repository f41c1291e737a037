"""Layers compute on the device of their parameters and inputs, whatever the default device is.

The device "meta" simulates a GPU: a tensor allocated on it by mistake has no values, and copying from it fails.
"""

from __future__ import annotations

import io

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

KINDS = [
    "Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "MultiheadAttention",
    "TransformerLayer",
]


def train(kind: str, recipe: str, device: str | None) -> list[torch.Tensor]:
    """Parameters after two steps and the output of a copy loaded from a checkpoint, under a default device."""
    torch.manual_seed(0)
    layer = make_layer(kind, device="cpu")
    other = make_layer(kind, device="cpu")
    x = torch.randn(16, 4, 64)
    args = (x.view(64, 64), [32, 32]) if kind == "GroupedLinear" else (x,)
    with torch.device(device or "cpu"):
        adam, sgd = (
            FusedAdam(layer.parameters(), lr=1e-2),
            FusedSGD(layer.parameters(), lr=1e-2, momentum=0.9),
        )
        for optimizer in (adam, sgd):
            with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                layer(*args).square().mean().backward()
            optimizer.step()
        adam.load_state_dict(adam.state_dict())
        stored = io.BytesIO()
        torch.save(layer.state_dict(), stored)
        stored.seek(0)
        other.load_state_dict(torch.load(stored, weights_only=False, map_location="cpu"))
        with torch.no_grad(), te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            return [*(p.detach() for p in layer.parameters()), other(*args)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_the_default_device_does_not_change_results(kind, recipe):
    for actual, expected in zip(
        train(kind, recipe, "meta"), train(kind, recipe, None), strict=True
    ):
        assert actual.device.type == "cpu"
        assert torch.equal(actual, expected)


def test_experts_and_losses_ignore_the_default_device():
    def computed() -> list[torch.Tensor]:
        x, probs = torch.randn(8, 16), torch.rand(8, 4)
        routing = torch.zeros(8, 4, dtype=torch.bool)
        routing[:, :2] = True
        with torch.device("meta"):
            permuted, _, rows = te.moe_permute_with_probs(x, probs, routing, num_out_tokens=16)
            back = te.moe_unpermute(permuted, rows, restore_shape=x.shape)
            loss = te.parallel_cross_entropy(
                x.view(2, 4, 16).clone(), torch.zeros(2, 4, dtype=torch.int64, device="cpu")
            )
        return [back, loss]

    assert all(result.device.type == "cpu" and result.isfinite().all() for result in computed())

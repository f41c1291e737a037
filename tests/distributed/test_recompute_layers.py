"""Layers that are run again in the backward: the bits, maxima and random numbers of layers that are not."""

from __future__ import annotations

import copy

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES, make_layer, same
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.quantization import emulate

WAYS = ("itself", "reentrant", "hooks", "nested", "itself within a checkpoint")


@pytest.fixture(autouse=True)
def _emulation():
    with emulate():
        yield


def _call(way, layer, x):
    if way == "nested":
        inner = lambda y: te.checkpoint(layer, y, use_reentrant=False)  # noqa: E731
        return te.checkpoint(inner, x, use_reentrant=True)
    if way in ("reentrant", "hooks", "itself within a checkpoint"):
        return te.checkpoint(layer, x, use_reentrant=way == "reentrant")
    return layer(x)


def _states(layer):
    return [
        tensor.clone()
        for key in ("scaling_fwd", "scaling_bwd")
        for state in layer.numerics.delayed_states(key)
        for tensor in (state.scale, state.amax_history)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_steps_have_the_bits_of_steps_that_keep_everything(recipe, way, device):
    plain = make_layer("LayerNormMLP", device=device)
    repeated = make_layer("LayerNormMLP", device=device, checkpoint="itself" in way)
    for step in range(3):
        results = []
        for layer, how in ((plain, ""), (repeated, way)):
            x = (
                torch.randn(16, 4, 64, generator=torch.Generator().manual_seed(step))
                .to(device)
                .requires_grad_()
            )
            layer.zero_grad()
            with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
                y = _call(how, layer, x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        assert same(*results)
        assert same(_states(plain), _states(repeated))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_dropout_under_a_tracker_drops_the_same_values_again(recipe, reentrant, device):
    """Two layers in a row draw from the tracker's state; later draws are the same as without recomputation."""
    results = []
    for recomputes in (False, True):
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 3)
        options = {
            "hidden_dropout": 0.2,
            "attention_dropout": 0.3,
            "get_rng_state_tracker": lambda t=tracker: t,
        }
        layers = [make_layer("TransformerLayer", device=device, **options) for _ in range(2)]
        torch.manual_seed(11)
        x = (
            torch.randn(16, 4, 64, generator=torch.Generator().manual_seed(5))
            .to(device)
            .requires_grad_()
        )
        y = x
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            for layer in layers:
                if recomputes:
                    y = te.checkpoint(
                        layer, y, use_reentrant=reentrant, get_rng_state_tracker=lambda t=tracker: t
                    )
                else:
                    y = layer(y)
        y.square().sum().backward()
        with tracker.fork():
            drawn = torch.rand(3, device=device)
        gradients = [p.grad for layer in layers for p in layer.parameters()]
        results.append([y.detach(), x.grad, drawn, torch.rand(3, device=device), *gradients])
    assert same(*results)


def test_a_copy_of_a_recomputing_layer_recomputes_too(device):
    layer = make_layer("LayerNormMLP", device=device, checkpoint=True)
    assert copy.deepcopy(layer).checkpoint

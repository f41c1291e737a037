"""Checkpoints that keep no scales: a second run under delayed scaling is announced; ours repeats them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

WIDTH = 32
SIZES = (1.0, 30.0, 0.01)
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])


def trained(device, recipe, through) -> list[torch.Tensor]:
    """Gradients of two steps of three micro-batches of different sizes, whose backwards follow all forwards."""
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, device=device)

    def function(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    found = []
    for _ in range(2):
        layer.zero_grad()
        inputs = [(size * torch.randn(16, WIDTH, device=device)).requires_grad_() for size in SIZES]
        losses = [through(function, x).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        found += [leaf.grad.clone() for leaf in (*inputs, layer.weight) if leaf.grad is not None]
    return found


@BOTH
def test_a_second_run_that_does_not_keep_its_scales_is_announced(reentrant, device):
    with pytest.warns(UserWarning, match="does not keep the scales of delayed scaling runs Linear again"):
        trained(device, DelayedScaling(), lambda f, x: torch_checkpoint(f, x, use_reentrant=reentrant))


@BOTH
@pytest.mark.parametrize("way", ["ours", "without history"])
def test_the_recommended_checkpoint_gives_plain_gradients_without_a_warning(way, reentrant, device):
    recipe = DelayedScaling if way == "ours" else Float8CurrentScaling
    run = te.checkpoint if way == "ours" else torch_checkpoint
    plain = trained(device, recipe(), lambda f, x: f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(device, recipe(), lambda f, x: run(f, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_a_layer_called_by_a_backward_hook_does_not_count_as_recomputation(device):
    layer, x = te.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    y = torch.randn(16, WIDTH, device=device, requires_grad=True)
    called = []

    def hook(gradient):
        with te.autocast(recipe=DelayedScaling()):
            called.append(layer(x))

    y.register_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (y * 2).sum().backward()
    assert len(called) == 1

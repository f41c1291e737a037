"""Delayed weight gradients after a backward pass that raised an exception."""

from __future__ import annotations

import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import make_layer
from tests.support.training import Fails

KINDS = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"]


def build_layer(kind, device, **options):
    torch.manual_seed(2)
    if kind == "GroupedLinear":
        return te.GroupedLinear(2, 64, 64, device=device, **options)
    return make_layer(
        kind, device=device, **({"out_features": 64} if "Linear" in kind else {}), **options
    )


def run(layer, seed, device, passes=1):
    """Run a forward and a backward pass, which fails in the node before the layer while `Fails.now` is set."""
    for number in range(passes):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed + number)).to(device)
        x = Fails.apply(x.requires_grad_())
        y = layer(x, [16, 16]) if isinstance(layer, te.GroupedLinear) else layer(x)
        y.square().sum().backward()


@pytest.mark.parametrize("before", [0, 1], ids=["alone", "behind a pass that succeeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_passs_gradients_do_not_reach_the_next_pass(kind, before, device):
    layer, plain = build_layer(kind, device, delay_wgrad_compute=True), build_layer(kind, device)
    plain.load_state_dict(layer.state_dict())
    run(layer, 0, device, before)
    Fails.now = True
    with pytest.raises(KeyError):
        run(layer, 10, device)
    Fails.now = False
    layer.zero_grad()
    run(layer, 20, device)
    with pytest.warns(
        UserWarning, match="delayed weight gradients of a backward pass that raised are dropped"
    ):
        layer.backward_dw()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(before):
            layer.backward_dw()
    run(plain, 0, device, before)
    run(plain, 20, device)
    for name, p in plain.named_parameters():
        if "weight" in name and p.dim() == 2:
            torch.testing.assert_close(layer.get_parameter(name).grad, p.grad)
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        layer.backward_dw()

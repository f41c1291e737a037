"""Callers may write a layer's results in place, like torch's results, with and without gradients."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import KINDS, RECIPES, make_call, make_layer, same, sample
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.quantization import autocast

WRITES = {
    "add_": (lambda y, r: y.add_(r), lambda y, r: y + r),
    "relu_": (lambda y, r: torch.nn.functional.relu_(y), lambda y, r: torch.relu(y)),
    "*=": (lambda y, r: y.__imul__(r), lambda y, r: y * r),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
# An attention's backward reads its output, as torch's does.
LAYERS = [kind.__name__ for kind in KINDS if kind is not te.DotProductAttention]


def outcome(name, change, recipe=None, dtype=torch.float32, **options):
    """The changed result from a layer's call, and all gradients if gradients are enabled."""
    layer = make_layer(name, **options).to(dtype)
    x, call = make_call(layer, dtype)
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = call()
    y = change(y, torch.linspace(-1.0, 1.0, y.shape[-1], dtype=y.dtype, device=y.device))
    if not torch.is_grad_enabled():
        return [y]
    (y.float() * torch.linspace(0.5, 2.0, y.shape[-1], device=y.device)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled
def test_a_result_is_written_in_place(name, write, dtype, mode):
    in_place, anew = WRITES[write]
    with MODES[mode]():
        assert same(outcome(name, in_place, dtype=dtype), outcome(name, anew, dtype=dtype))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled
def test_a_result_is_written_in_place_under_every_recipe(name, recipe, emulated):
    in_place, anew = WRITES["add_"]
    assert same(*(outcome(name, change, RECIPES[recipe]) for change in (in_place, anew)))


def test_gradients_after_in_place_writes_equal_torch(device):
    ours = te.Linear(64, 96, device=device)
    plain = torch.nn.Linear(64, 96, device=device)
    plain.load_state_dict({"weight": ours.weight.detach(), "bias": ours.bias.detach()})
    results = []
    for layer in (ours, plain):
        torch.manual_seed(2)
        x = sample(device)
        y = layer(x)
        y += x.mean()
        y = torch.nn.functional.relu_(y)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


RETURNING = {
    "plain": None,
    "current": Float8CurrentScaling(),
    "high_precision": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
}


def run_with_norm_output(kind, x, recipe=None):
    layer = kind(64, 96, return_layernorm_output=True, device=x.device)
    with autocast(enabled=recipe is not None, recipe=recipe):
        return layer(x)


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_a_norms_output_written_before_the_backward_reads_it_raises(kind, device):
    y, norm_output = run_with_norm_output(kind, sample(device))
    norm_output.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_a_norms_output_may_be_written_if_the_backward_reads_codes(kind, device, emulated):
    results = []
    for change in WRITES["add_"]:
        torch.manual_seed(3)
        x = sample(device)
        y, norm_output = run_with_norm_output(kind, x, Float8CurrentScaling())
        (y.sum() + change(norm_output, torch.ones_like(norm_output)).square().sum()).backward()
        results.append([y.detach(), x.grad])
    assert same(*results)


@pytest.mark.parametrize("recipe", RETURNING)
@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_a_returned_norms_output_keeps_no_node_alive(kind, recipe, device, emulated):
    x = sample(device)
    y, norm_output = run_with_norm_output(kind, x, RETURNING[recipe])
    gone = weakref.ref(y.grad_fn)
    gc.disable()
    try:
        del y, norm_output
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", ["mask", "index"])
def test_merged_experts_are_written_in_place(layout, device):
    x, weights = sample(device, (8,)), torch.rand(8, 4 if layout == "mask" else 2, device=device)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]] * 2, dtype=torch.int32, device=device)
    mask = torch.zeros(8, 4, dtype=torch.int32, device=device).scatter_(1, chosen.long(), 1)
    results = []
    for change in WRITES["add_"]:
        x.grad = None
        rows, order = te.moe_permute(
            x, mask if layout == "mask" else chosen, num_out_tokens=16, map_type=layout
        )
        merged = te.moe_unpermute(
            rows, order, merging_probs=weights, restore_shape=x.shape, map_type=layout
        )
        y = change(merged, torch.ones_like(x))
        y.square().sum().backward()
        results.append([y.detach(), x.grad])
    assert same(*results)


def test_a_mean_loss_is_divided_in_place(device):
    hidden, weight = sample(device, (6,)), torch.randn(32, 64, device=device, requires_grad=True)
    targets = torch.arange(6, device=device)
    results = []
    for divide in (lambda loss: loss.div_(4), lambda loss: loss / 4):
        hidden.grad = weight.grad = None
        loss = divide(te.fused_linear_cross_entropy(hidden, weight, targets))
        loss.backward()
        results.append([loss.detach(), hidden.grad, weight.grad])
    assert same(*results)

"""main_grad within a step: the first microbatch's first gradient overwrites it, and all others add to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te

HIDDEN = 16
LAYERS = {
    "linear": lambda **options: te.Linear(HIDDEN, HIDDEN, bias=False, **options),
    "layernorm_linear": lambda **options: te.LayerNormLinear(HIDDEN, HIDDEN, bias=False, **options),
    "layernorm_mlp": lambda **options: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, bias=False, **options),
    "grouped_linear": lambda **options: te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False, **options),
}
CHECKPOINTS = {
    "none": lambda function, x: function(x),
    "te reentrant": lambda function, x: te.checkpoint(function, x, use_reentrant=True),
    "te": lambda function, x: te.checkpoint(function, x, use_reentrant=False),
    "torch reentrant": lambda function, x: torch_checkpoint(function, x, use_reentrant=True),
    "torch": lambda function, x: torch_checkpoint(function, x, use_reentrant=False),
}


def weights(layer):
    return [p for p in layer.parameters() if p.dim() == 2]


def pair(kind, device, **options):
    """A layer whose main_grad has an earlier step's values, and an equal layer that uses .grad."""
    layer = LAYERS[kind](device=device, fuse_wgrad_accumulation=True, **options)
    for p in weights(layer):
        p.main_grad = torch.full_like(p, 7.0, dtype=torch.float32)
    plain = LAYERS[kind](device=device)
    plain.load_state_dict(layer.state_dict())
    return layer, plain


def call(layer, x, first=None):
    splits = ([x.shape[0] // 2, x.shape[0] // 2],) if isinstance(layer, te.GroupedLinear) else ()
    return layer(x, *splits, is_first_microbatch=first)


def check(layer, plain):
    for got, expected in zip(weights(layer), weights(plain), strict=True):
        torch.testing.assert_close(got.main_grad, expected.grad, rtol=1e-4, atol=1e-4)


def sample(device):
    return torch.randn(8, HIDDEN, device=device, requires_grad=True)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("firsts", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.sampled
def test_a_layer_that_is_called_twice_accumulates_both_gradients(kind, firsts, way, device):
    layer, plain = pair(kind, device)
    x = sample(device)
    y = x
    for first in firsts:
        y = CHECKPOINTS[way](lambda y, first=first: call(layer, y, first), y)
    y.sum().backward()
    call(plain, call(plain, x)).sum().backward()
    check(layer, plain)


@pytest.mark.parametrize("kind", LAYERS)
def test_several_forward_passes_with_one_backward_pass_accumulate(kind, device):
    layer, plain = pair(kind, device)
    inputs = [sample(device) for _ in range(3)]
    for module in (layer, plain):
        firsts = (True, True, False) if module is layer else (None,) * 3
        sum(
            call(module, x, first).sum() for x, first in zip(inputs, firsts, strict=True)
        ).backward()
    check(layer, plain)


def test_tied_modules_accumulate_into_one_main_grad(device):
    layer, plain = pair("linear", device)
    tied = te.LayerNormLinear(
        HIDDEN, HIDDEN, bias=False, device=device, fuse_wgrad_accumulation=True
    )
    twin = te.LayerNormLinear(HIDDEN, HIDDEN, bias=False, device=device)
    tied.weight, twin.weight = layer.weight, plain.weight
    x = sample(device)
    call(tied, call(layer, x, True), True).sum().backward()
    call(twin, call(plain, x)).sum().backward()
    check(layer, plain)


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_modules_that_share_one_main_grad_accumulate_both_gradients(kind, way, device):
    (first, plain), (second, _) = pair(kind, device), pair(kind, device)
    second.load_state_dict(first.state_dict())
    for local, other in zip(weights(first), weights(second), strict=True):
        other.main_grad = local.main_grad
    for scale in (1.0, 3.0):  # the second step overwrites the first step's sums
        plain.zero_grad()
        x = (scale * sample(device)).detach().requires_grad_()
        y = CHECKPOINTS[way](lambda x: call(first, x, True), x)
        CHECKPOINTS[way](lambda y: call(second, y, True), y).sum().backward()
        for _ in range(2):
            z = CHECKPOINTS[way](lambda x: call(first, x, False), x)
            CHECKPOINTS[way](lambda z: call(second, z, False), z).sum().backward()
        for _ in range(3):
            call(plain, call(plain, x)).sum().backward()
        for got, expected in zip(weights(first), weights(plain), strict=True):
            torch.testing.assert_close(got.main_grad, expected.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_microbatch_of_every_step_overwrites_main_grad(kind, device):
    layer, plain = pair(kind, device)
    for _ in range(2):
        for p in weights(plain):
            p.grad = None
        for first in (True, False, False):
            x = sample(device)
            call(layer, x, first).sum().backward()
            call(plain, x).sum().backward()
        check(layer, plain)


def test_evaluation_between_microbatches_keeps_main_grad(device):
    layer, plain = pair("linear", device)
    for first in (True, False):
        x = sample(device)
        call(layer, x, first).sum().backward()
        call(plain, x).sum().backward()
        with torch.no_grad():
            call(layer, x, True)
    check(layer, plain)


def test_delayed_weight_gradients_accumulate_both_calls(device):
    layer, plain = pair("linear", device, delay_wgrad_compute=True)
    x = sample(device)
    call(layer, call(layer, x, True), False).sum().backward()
    for _ in range(2):
        layer.backward_dw()
    call(plain, call(plain, x)).sum().backward()
    check(layer, plain)


def test_stacked_weights_accumulate_both_calls(device, monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    layer = te.GroupedLinear(
        2,
        HIDDEN,
        HIDDEN,
        bias=False,
        device=device,
        fuse_wgrad_accumulation=True,
        single_grouped_weight=True,
    )
    plain = copy.deepcopy(layer)
    plain.fuse_wgrad_accumulation = False
    layer.weight.main_grad = torch.full_like(layer.weight, 7.0)
    x = sample(device)
    call(layer, call(layer, x, True), False).sum().backward()
    call(plain, call(plain, x)).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("firsts", [(True,), (False,), (True, False), (True, True)])
@pytest.mark.parametrize("joint", ["0", "1"])
def test_experts_with_one_main_grad_accumulate_all_gradients(
    joint, firsts, delayed, device, monkeypatch
):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", joint)
    options = {"bias": False, "device": device, "params_dtype": torch.bfloat16}
    layer = te.GroupedLinear(
        4, HIDDEN, HIDDEN, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed, **options
    )
    plain = te.GroupedLinear(4, HIDDEN, HIDDEN, **options)
    plain.load_state_dict(layer.state_dict())
    shared, single = (torch.full((HIDDEN, HIDDEN), 7.0, device=device) for _ in range(2))
    for number, weight in enumerate(weights(layer)):
        weight.main_grad = single if number == 1 else shared
    for first in firsts:
        x = torch.randn(32, HIDDEN, device=device, dtype=torch.bfloat16)
        splits = [8, 4, 0, 20]
        layer(x, splits, is_first_microbatch=first).float().square().sum().backward()
        if delayed:
            layer.backward_dw()
        plain(x, splits).float().square().sum().backward()
        if first:  # a step begins
            expected = [torch.zeros_like(shared) for _ in range(2)]
        elif len(firsts) == 1:
            expected = [torch.full_like(shared, 7.0) for _ in range(2)]
        for number, weight in enumerate(weights(plain)):
            expected[number == 1] += weight.grad
            weight.grad = None
    torch.testing.assert_close(shared, expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(single, expected[1], rtol=1e-2, atol=1e-2)


def test_compiled_experts_with_one_main_grad_accumulate_all_gradients():
    torch.manual_seed(0)
    layer = te.GroupedLinear(
        3, HIDDEN, HIDDEN, bias=False, device="cpu", fuse_wgrad_accumulation=True
    )
    plain = te.GroupedLinear(3, HIDDEN, HIDDEN, bias=False, device="cpu")
    plain.load_state_dict(layer.state_dict())
    shared, single = (torch.full((HIDDEN, HIDDEN), 7.0) for _ in range(2))
    for number, weight in enumerate(weights(layer)):
        weight.main_grad = single if number == 1 else shared
    x = torch.randn(24, HIDDEN)
    run = torch.compile(
        lambda x: layer(x, [8, 8, 8], is_first_microbatch=True), backend="aot_eager"
    )
    run(x).square().sum().backward()
    plain(x, [8, 8, 8]).square().sum().backward()
    first, second, third = (weight.grad for weight in weights(plain))
    torch.testing.assert_close(shared, first + third, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single, second, rtol=1e-4, atol=1e-4)

"""GroupedLinear writes its output and its input's gradient where the caller says."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SPLITS = [16, 0, 32]


def layer_of(device, dtype=torch.float32, **options):
    return te.GroupedLinear(3, 64, 32, device=device, params_dtype=dtype, **options)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_results_are_written_into_the_buffers_and_share_them(recipe, together, device, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1" if together else "0")
    dtype = torch.bfloat16 if together else torch.float32
    layer = layer_of(device, dtype)
    x = torch.randn(48, 64, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(48, 32, device=device, dtype=dtype)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        want = layer(x, SPLITS)
    want.backward(grad)
    want_grad, x.grad = x.grad, None
    want_weights = [p.grad.clone() for p in layer.parameters()]
    out = torch.full((48, 32), float("nan"), device=device, dtype=dtype)
    dgrad_out = torch.full((48, 64), float("nan"), device=device, dtype=dtype)
    for _ in range(2):  # a buffer serves step after step
        x.grad = None
        layer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, SPLITS, out=out, dgrad_out=dgrad_out)
        assert y.data_ptr() == out.data_ptr() and not out.requires_grad and y.requires_grad
        assert torch.equal(out, want)
        y.backward(grad)
        assert torch.equal(dgrad_out, want_grad) and torch.equal(x.grad, want_grad)
        for p, wanted in zip(layer.parameters(), want_weights, strict=True):
            assert torch.equal(p.grad, wanted)
        out.fill_(float("nan"))


def test_leading_dimensions_and_inference_take_buffers_too(device):
    layer = layer_of(device, return_bias=True)
    x = torch.randn(4, 12, 64, device=device)
    out = torch.empty(4, 12, 32, device=device)
    with torch.no_grad():
        y, biases = layer(x, SPLITS, None, out)
        want, _ = layer(x, SPLITS)
    assert torch.equal(out, want) and y.data_ptr() == out.data_ptr() and len(biases) == 3


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (lambda d: torch.empty(48, 31, device=d), r"out is \[48, 31\], the result \[48, 32\]"),
        (lambda d: torch.empty(48, 32, device=d).bfloat16(), r"out is torch.bfloat16 on"),
        (lambda d: torch.empty(32, 48, device=d).t(), "out is not contiguous"),
        (lambda d: torch.empty(48, 32, device=d, requires_grad=True), "out requires a gradient"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_and_nothing_is_written(buffer, words, device):
    layer = layer_of(device)
    x = torch.randn(48, 64, device=device, requires_grad=True)
    given = buffer(device)
    with torch.no_grad():
        given.fill_(7.0)
    with pytest.raises(ValueError, match=words):
        layer(x, SPLITS, out=given)
    assert (given == 7.0).all()
    with pytest.raises(ValueError, match="dgrad_out is"):
        layer(x, SPLITS, dgrad_out=torch.empty(48, 32, device=device))
    with pytest.raises(TypeError, match="out is a list"):
        layer(x, SPLITS, out=[given])

"""Normalization and activation as differentiable functions: shapes, strides, saved tensors, one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_engine.pytorch.functions.activation import activation
from transformer_engine.pytorch.functions.norm import (
    normalize,
    normalize_backward,
    normalize_forward,
)
from transformer_engine.pytorch.functions.normalization import Norm

KINDS = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


def _torch_norm(kind, x, gamma, beta, eps=1e-5):
    if kind == "LayerNorm":
        return F.layer_norm(x, gamma.shape, gamma, beta, eps)
    return F.rms_norm(x, gamma.shape, gamma, eps)


def _parameters(kind, shape, device):
    gamma = torch.rand(shape, device=device).add(0.5).requires_grad_()
    beta = torch.randn(shape, device=device).requires_grad_() if kind == "LayerNorm" else None
    return gamma, beta


@KINDS
@pytest.mark.parametrize(
    "shape, normalized", [((3, 4, 8), (8,)), ((2, 3, 4, 5), (4, 5)), ((16,), (16,))]
)
def test_values_and_gradients_equal_torch(kind, shape, normalized, device):
    gamma, beta = _parameters(kind, normalized, device)
    x = torch.randn(shape, device=device, requires_grad=True)
    dy = torch.randn(shape, device=device)
    reference = [t for t in (x, gamma, beta) if t is not None]
    actual = normalize(x, gamma, beta, Norm(kind))
    expected = _torch_norm(kind, x, gamma, beta)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(
        torch.autograd.grad(actual, reference, dy),
        torch.autograd.grad(expected, reference, dy),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@KINDS
def test_noncontiguous_inputs_and_broadcast_gradients_are_supported(kind, device):
    gamma, beta = _parameters(kind, (8,), device)
    x = torch.randn(8, 5, 3, device=device).permute(2, 1, 0).detach().requires_grad_()
    y = normalize(x, gamma, beta, Norm(kind))
    y.sum().backward()
    expected = _torch_norm(kind, x.detach().contiguous().requires_grad_(), gamma, beta)
    torch.testing.assert_close(y, expected)
    assert x.grad is not None and x.grad.shape == x.shape


@KINDS
def test_zero_tokens_give_zero_parameter_gradients(kind, device):
    gamma, beta = _parameters(kind, (8,), device)
    x = torch.randn(0, 3, 8, device=device, requires_grad=True)
    normalize(x, gamma, beta, Norm(kind)).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 3, 8)
    assert gamma.grad is not None and not gamma.grad.any()


@KINDS
def test_autograd_runs_the_plain_forward_and_backward_functions(kind, device):
    gamma, beta = _parameters(kind, (8,), device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    dy = torch.randn(4, 8, device=device)
    norm = Norm(kind, 1e-5, True)
    y, mean, rstdev = normalize_forward(x.detach(), gamma.detach(), beta, norm)
    dx, dgamma, dbeta = normalize_backward(dy, x.detach(), mean, rstdev, gamma.detach(), norm)
    output = normalize(x, gamma, beta, norm)
    output.backward(dy)
    assert torch.equal(output, y) and torch.equal(x.grad, dx) and torch.equal(gamma.grad, dgamma)
    assert (beta is None) == (dbeta is None)
    assert beta is None or torch.equal(beta.grad, dbeta)


@KINDS
def test_the_backward_keeps_the_input_and_the_statistics_and_no_copy(kind, device):
    gamma, beta = _parameters(kind, (64,), device)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normalize(x, gamma, beta, Norm(kind))
    fresh = [t for t in saved if t.data_ptr() not in (x.data_ptr(), gamma.data_ptr())]
    assert all(t.shape == (16,) for t in fresh)


@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
def test_activation_is_differentiable_and_keeps_only_its_input(name, device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = activation(name, x)
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    y.sum().backward()
    step = 1e-2
    numeric = (activation(name, x + step) - activation(name, x - step)).sum() / (2 * step)
    torch.testing.assert_close(x.grad.sum(), numeric, rtol=2e-2, atol=2e-2)


def test_forward_and_backward_trace_without_a_graph_break(device):
    gamma, beta = _parameters("LayerNorm", (8,), device)
    x = torch.randn(4, 8, device=device, requires_grad=True)

    def run(x, gamma, beta):
        y = normalize(x, gamma, beta, Norm("LayerNorm"))
        return activation("swiglu", normalize(y, gamma, None, Norm("RMSNorm")))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(run(x, gamma, beta).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x, gamma, beta).sum(), x)[0], expected)

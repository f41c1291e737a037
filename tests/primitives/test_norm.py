"""Layer and root-mean-square normalization: values, gradients, edges, against float64 autograd and torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.tolerances import DTYPES, ROUNDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives import norm
from transformer_engine.pytorch.primitives.norm.reference import NormRequest

EPS = 1e-5
ZERO_CENTERED = pytest.mark.parametrize("zero_centered", [False, True])
SHAPES = pytest.mark.parametrize("rows, width", [(1, 1), (1, 31), (7, 32), (5, 33), (64, 257)])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


def _inputs(rows, width, dtype, device, zero_centered):
    x = torch.randn(rows, width, device=device).mul(2.0).add(0.5).to(dtype)
    weight = torch.randn(width, device=device).mul(0.2).add(0.0 if zero_centered else 1.0).to(dtype)
    bias = torch.randn(width, device=device).to(dtype)
    dy = torch.randn(rows, width, device=device).to(dtype)
    return x, weight, bias, dy


def _layernorm64(x, weight, bias, zero_centered):
    gamma = weight + 1.0 if zero_centered else weight
    return F.layer_norm(x, (x.shape[-1],), gamma, bias, EPS)


def _rmsnorm64(x, weight, zero_centered):
    gamma = weight + 1.0 if zero_centered else weight
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gamma


def _wide(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def _close(actual, expected, dtype):
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected, rtol=ROUNDED[dtype], atol=ROUNDED[dtype] * scale
    )


@SHAPES
@DTYPES
@ZERO_CENTERED
def test_layernorm_and_its_gradients_equal_float64_autograd(
    rows, width, dtype, zero_centered, device
):
    x, weight, bias, dy = _inputs(rows, width, dtype, device, zero_centered)
    x64, weight64, bias64 = _wide(x, weight, bias)
    expected = _layernorm64(x64, weight64, bias64, zero_centered)
    expected.backward(dy.double())

    y, mean, rstdev = norm.layernorm_forward(x, weight, bias, EPS, zero_centered)
    dx, dweight, dbias = norm.layernorm_backward(dy, x, mean, rstdev, weight, zero_centered)

    assert y.dtype == dx.dtype == dweight.dtype == dbias.dtype == dtype
    assert mean.dtype == rstdev.dtype == torch.float32
    assert mean.shape == rstdev.shape == (rows,)
    _close(y, expected.detach(), dtype)
    # width 1 has zero variance: dx is a difference between equal numbers times rsqrt(eps), about 300.
    if width > 1:
        _close(dx, x64.grad, dtype)
    _close(dweight, weight64.grad, dtype)
    _close(dbias, bias64.grad, dtype)


@SHAPES
@DTYPES
@ZERO_CENTERED
def test_rmsnorm_and_its_gradients_equal_float64_autograd(
    rows, width, dtype, zero_centered, device
):
    x, weight, _, dy = _inputs(rows, width, dtype, device, zero_centered)
    x64, weight64 = _wide(x, weight)
    expected = _rmsnorm64(x64, weight64, zero_centered)
    expected.backward(dy.double())

    y, rstdev = norm.rmsnorm_forward(x, weight, EPS, zero_centered)
    dx, dweight = norm.rmsnorm_backward(dy, x, rstdev, weight, zero_centered)

    assert y.dtype == dx.dtype == dweight.dtype == dtype
    assert rstdev.dtype == torch.float32 and rstdev.shape == (rows,)
    _close(y, expected.detach(), dtype)
    _close(dx, x64.grad, dtype)
    _close(dweight, weight64.grad, dtype)


def test_layernorm_without_bias_equals_layernorm_with_a_zero_bias(device):
    x, weight, bias, _ = _inputs(4, 16, torch.float32, device, False)
    without = norm.layernorm_forward(x, weight, None, EPS, False)[0]
    zero = norm.layernorm_forward(x, weight, torch.zeros_like(bias), EPS, False)[0]
    assert torch.equal(without, zero)


def test_rmsnorm_backward_adds_before_it_rounds(device):
    x, weight, _, dy = _inputs(8, 64, torch.bfloat16, device, False)
    add = torch.randn(8, 64, device=device).bfloat16()
    rstdev = norm.rmsnorm_forward(x, weight, EPS, False)[1]
    unrounded, _ = norm.rmsnorm_backward(dy.float(), x.float(), rstdev, weight, False)
    dx, _ = norm.rmsnorm_backward(dy, x, rstdev, weight, False, add)
    torch.testing.assert_close(dx, (unrounded + add.float()).bfloat16(), rtol=8e-3, atol=1e-6)


def test_a_mean_much_larger_than_the_deviation_does_not_cancel_the_variance(device):
    x = torch.randn(4, 256, device=device) + 4096.0
    y, _, _ = norm.layernorm_forward(x, torch.ones(256, device=device), None, EPS, False)
    expected = F.layer_norm(x.double(), (256,), eps=EPS)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_zero_rows_give_an_empty_result_and_zero_parameter_gradients(kind, device):
    x, weight, bias, dy = _inputs(0, 16, torch.float32, device, False)
    if kind == "layernorm":
        y, mean, rstdev = norm.layernorm_forward(x, weight, bias, EPS, False)
        dx, *grads = norm.layernorm_backward(dy, x, mean, rstdev, weight, False)
    else:
        y, rstdev = norm.rmsnorm_forward(x, weight, EPS, False)
        dx, *grads = norm.rmsnorm_backward(dy, x, rstdev, weight, False)
    assert y.shape == dx.shape == (0, 16)
    assert all(not grad.any() for grad in grads)


def test_strided_inputs_equal_their_contiguous_copies(device):
    x, weight, bias, _ = _inputs(32, 12, torch.float32, device, False)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    for expected, actual in zip(
        norm.layernorm_forward(x, weight, bias, EPS, False),
        norm.layernorm_forward(strided, weight, bias, EPS, False),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_nan_stays_in_its_row(device):
    x, weight, bias, _ = _inputs(3, 8, torch.float32, device, False)
    x[1, 2] = float("nan")
    for y in (
        norm.layernorm_forward(x, weight, bias, EPS, False)[0],
        norm.rmsnorm_forward(x, weight, EPS, False)[0],
    ):
        assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_parameter_gradients_keep_the_weights_dtype(device):
    x, weight, bias, dy = _inputs(4, 8, torch.bfloat16, device, False)
    _, mean, rstdev = norm.layernorm_forward(x, weight.float(), bias.float(), EPS, False)
    dx, dweight, dbias = norm.layernorm_backward(dy, x, mean, rstdev, weight.float(), False)
    assert dx.dtype == torch.bfloat16 and dweight.dtype == dbias.dtype == torch.float32


@pytest.mark.parametrize("name", norm.TABLE.names())
@DTYPES
def test_every_backend_agrees_with_the_reference(name, dtype, device):
    x, weight, bias, dy = _inputs(37, 320, dtype, device, False)
    request = NormRequest("layernorm_forward", x.shape, x.stride(), dtype, dtype, x.device, False)
    reason = norm.TABLE.named(name).unsupported_reason(request)
    if reason is not None:
        pytest.skip(reason)
    results = []
    for backend in ("reference", name):
        with use_backend(norm=backend):
            y, mean, rstdev = norm.layernorm_forward(x, weight, bias, EPS, False)
            z, inverse = norm.rmsnorm_forward(x, weight, EPS, True)
            results.append(
                (
                    y,
                    mean,
                    rstdev,
                    z,
                    inverse,
                    *norm.layernorm_backward(dy, x, mean, rstdev, weight, False),
                    *norm.rmsnorm_backward(dy, x, inverse, weight, True, add=y),
                )
            )
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        _close(actual, expected.double(), dtype)


def test_an_unknown_backend_raises_with_the_known_ones():
    with pytest.raises(ValueError, match="reference"), use_backend(norm="nonesuch"):
        pass


def test_all_four_operations_trace_into_one_graph(device):
    x, weight, bias, dy = _inputs(4, 8, torch.float32, device, False)

    def run(x, weight, bias, dy):
        y, mean, rstdev = norm.layernorm_forward(x, weight, bias, EPS, False)
        z, inverse = norm.rmsnorm_forward(y, weight, EPS, False)
        dz, _ = norm.rmsnorm_backward(dy, y, inverse, weight, False)
        return z, norm.layernorm_backward(dz, x, mean, rstdev, weight, False)[0]

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for expected, actual in zip(
        run(x, weight, bias, dy), compiled(x, weight, bias, dy), strict=True
    ):
        assert torch.equal(expected, actual)

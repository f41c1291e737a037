"""The Triton norms against float64 autograd: on a GPU, and on small shapes in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, INTERPRETED, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, SUMMED
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives import norm
from transformer_engine.pytorch.primitives.norm import triton
from transformer_engine.pytorch.primitives.norm.reference import NormRequest
from transformer_engine.pytorch.runtime import launching

kernels = Kernels(norm, "norm")
EPS = 1e-5
# One unit in the last place of the output format; float32 sums over many terms lose a few more bits.
SMALL = [(1, 1), (7, 32), (5, 33), (3, 2049)]
LARGE = [
    (1000, 128),
    (64, 2048),
    (300, 4097),
    (515, 8192),
    (40, 8193),
    (133, 12288),
    (40, 16385),
    (5, 100001),
]
SHAPES = parametrize_sizes("rows, width", SMALL, LARGE)
ZERO_CENTERED = pytest.mark.parametrize("zero_centered", [False, True])


def _inputs(rows, width, dtype):
    x = torch.randn(rows, width, device=DEVICE).mul(2.0).add(0.5).to(dtype)
    weight = torch.randn(width, device=DEVICE).mul(0.2).add(0.5).to(dtype)
    bias, dy = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((width,), (rows, width)))
    return x, weight, bias, dy


def _float64_results(x, weight, bias, dy, zero_centered):
    """(y, dx, dweight, dbias or None) in float64"""
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    gamma = weight + 1.0 if zero_centered else weight
    if bias is None:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * gamma
        return (y.detach(), *torch.autograd.grad(y, (x, weight), dy.double()), None)
    bias = bias.double().requires_grad_()
    y = F.layer_norm(x, x.shape[-1:], gamma, bias, EPS)
    return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy.double()))


def _close(actual, expected, dtype=None):
    tolerance = SUMMED[dtype or actual.dtype]
    limit = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=limit)


@runs_kernels
@SHAPES
@DTYPES
@ZERO_CENTERED
def test_layernorm_and_its_gradients_equal_float64(rows, width, dtype, zero_centered):
    x, weight, bias, dy = _inputs(rows, width, dtype)
    y64, dx64, dweight64, dbias64 = _float64_results(x, weight, bias, dy, zero_centered)
    y, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, zero_centered)
    dx, dweight, dbias = kernels.layernorm_backward(dy, x, mean, rstdev, weight, zero_centered)
    assert {t.dtype for t in (y, dx, dweight, dbias)} == {dtype}
    _close(mean, x.double().mean(-1))
    _close(y, y64)
    _close(dbias, dbias64)
    # one number has no variance: its gradient is a difference between equal numbers times 300
    if width > 1:
        _close(dx, dx64)
        _close(dweight, dweight64)


@runs_kernels
@SHAPES
@DTYPES
@ZERO_CENTERED
def test_rmsnorm_and_its_gradients_equal_float64(rows, width, dtype, zero_centered):
    x, weight, _, dy = _inputs(rows, width, dtype)
    add = torch.randn_like(x)
    y64, dx64, dweight64, _ = _float64_results(x, weight, None, dy, zero_centered)
    y, rstdev = kernels.rmsnorm_forward(x, weight, EPS, zero_centered)
    dx, dweight = kernels.rmsnorm_backward(dy, x, rstdev, weight, zero_centered)
    with_residual, _ = kernels.rmsnorm_backward(dy, x, rstdev, weight, zero_centered, add)
    assert {t.dtype for t in (y, dx, dweight, with_residual)} == {dtype}
    _close(rstdev, torch.rsqrt(x.double().square().mean(-1) + EPS))
    _close(y, y64)
    _close(dx, dx64)
    _close(dweight, dweight64)
    _close(with_residual, dx64 + add.double())


@runs_kernels
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("rows, width", [(5, 48), (2, 8200), (2, 16400)])
def test_residual_gradient_is_added_to_the_norms_rounded_gradient(rows, width, centered):
    x, weight, _, dy = _inputs(rows, width, torch.bfloat16)
    add = torch.randn_like(x)
    if centered:
        _, *statistics = kernels.layernorm_forward(x, weight, None, EPS, False)
        dx, *sums = kernels.layernorm_backward(dy, x, *statistics, weight, False)
        joint = kernels.layernorm_backward(dy, x, *statistics, weight, False, add)
    else:
        _, rstdev = kernels.rmsnorm_forward(x, weight, EPS, False)
        dx, *sums = kernels.rmsnorm_backward(dy, x, rstdev, weight, False)
        joint = kernels.rmsnorm_backward(dy, x, rstdev, weight, False, add, True)
    assert all(torch.equal(a, b) for a, b in zip(joint, (dx + add, *sums), strict=True))


@runs_kernels
@pytest.mark.parametrize("rows, width", [(2, 8200), (2, 16400)])
def test_rows_too_wide_for_one_tile_equal_float64(rows, width):
    x, weight, bias, dy = _inputs(rows, width, torch.float32)
    y64, dx64, dweight64, dbias64 = _float64_results(x, weight, bias, dy, True)
    y, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, True)
    gradients = kernels.layernorm_backward(dy, x, mean, rstdev, weight, True)
    for actual, expected in zip((y, *gradients), (y64, dx64, dweight64, dbias64), strict=True):
        _close(actual, expected)
    y64, dx64, dweight64, _ = _float64_results(x, weight, None, dy, False)
    y, rstdev = kernels.rmsnorm_forward(x, weight, EPS, False)
    gradients = kernels.rmsnorm_backward(dy, x, rstdev, weight, False)
    for actual, expected in zip((y, *gradients), (y64, dx64, dweight64), strict=True):
        _close(actual, expected)


@runs_kernels
@pytest.mark.parametrize(
    "rows, width", [(5, 48)] if INTERPRETED else [(5, 48), (200, 4096), (9, 20000)]
)
def test_strided_inputs_are_bitwise_equal_to_contiguous_ones(rows, width):
    x, weight, bias, dy = _inputs(rows, width, torch.bfloat16)
    y, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, False)
    gradients = kernels.layernorm_backward(dy, x, mean, rstdev, weight, False)
    for separate in (_rows_apart, _columns_apart):
        x_apart, dy_apart = separate(x), separate(dy)
        assert not x_apart.is_contiguous() and torch.equal(x_apart, x)
        assert torch.equal(kernels.layernorm_forward(x_apart, weight, bias, EPS, False)[0], y)
        repeated = kernels.layernorm_backward(dy_apart, x_apart, mean, rstdev, weight, False)
        assert all(torch.equal(a, b) for a, b in zip(repeated, gradients, strict=True))


def _rows_apart(x):
    return torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, : x.shape[1]]


def _columns_apart(x):
    return torch.stack((x, torch.full_like(x, float("nan"))), dim=-1)[..., 0]


@runs_kernels
def test_a_mean_much_larger_than_the_deviation_does_not_cancel_the_variance():
    x = torch.randn(4, 256, device=DEVICE) + 4096.0
    y, _, _ = kernels.layernorm_forward(x, torch.ones(256, device=DEVICE), None, EPS, False)
    torch.testing.assert_close(
        y.double(), F.layer_norm(x.double(), (256,), eps=EPS), rtol=0, atol=1e-2
    )


@runs_kernels
def test_float32_weight_gradients_are_not_rounded_to_the_input_dtype():
    x, weight, bias, dy = _inputs(6, 64, torch.bfloat16)
    weight, bias = weight.float(), bias.float()
    _, _, dweight64, dbias64 = _float64_results(x, weight, bias, dy, False)
    _, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, False)
    dx, dweight, dbias = kernels.layernorm_backward(dy, x, mean, rstdev, weight, False)
    assert dx.dtype == torch.bfloat16
    _close(dweight, dweight64, torch.float32)
    _close(dbias, dbias64, torch.float32)


@runs_kernels
def test_zero_rows_give_an_empty_result_and_zero_parameter_gradients():
    x, weight, bias, dy = _inputs(0, 16, torch.bfloat16)
    y, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, False)
    dx, dweight, dbias = kernels.layernorm_backward(dy, x, mean, rstdev, weight, False)
    assert y.shape == dx.shape == (0, 16) and mean.shape == rstdev.shape == (0,)
    assert not dweight.any() and not dbias.any()
    assert kernels.rmsnorm_forward(x, weight, EPS, False)[0].shape == (0, 16)
    assert not kernels.rmsnorm_backward(dy, x, rstdev, weight, False)[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width", [(4099, 1024), (3001, 8192), (517, 16384), (517, 24576)])
def test_two_runs_give_the_same_bits(rows, width):
    x, weight, bias, dy = _inputs(rows, width, torch.bfloat16)
    _, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, False)
    first = kernels.layernorm_backward(dy, x, mean, rstdev, weight, False)
    for _ in range(5):
        repeated = kernels.layernorm_backward(dy, x, mean, rstdev, weight, False)
        assert all(torch.equal(a, b) for a, b in zip(repeated, first, strict=True))


@pytest.mark.gpu
def test_compiled_code_launches_the_same_kernels_without_a_graph_break():
    x, weight, bias, dy = _inputs(64, 512, torch.bfloat16)

    def both(x, weight, bias, dy):
        y, mean, rstdev = norm.layernorm_forward(x, weight, bias, EPS, True)
        z, rstdev_z = norm.rmsnorm_forward(y, weight, EPS, False)
        dx, dweight = norm.rmsnorm_backward(dy, z, rstdev_z, weight, False, y)
        return (y, z, dx, dweight, *norm.layernorm_backward(dy, x, mean, rstdev, weight, True))

    with use_backend(norm="triton"):
        eager = both(x, weight, bias, dy)
        compiled = torch.compile(both, fullgraph=True)(x, weight, bias, dy)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


@pytest.mark.gpu
def test_registered_operators_pass_schema_and_fake_tensor_checks():
    x, weight, bias, dy = _inputs(8, 64, torch.bfloat16)
    _, mean, rstdev = kernels.layernorm_forward(x, weight, bias, EPS, False)
    operators = torch.ops.transformer_engine
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operators.layernorm_forward, (x, weight, bias, EPS, False), test_utils=checks
    )
    torch.library.opcheck(
        operators.layernorm_backward, (dy, x, mean, rstdev, weight, x, False), test_utils=checks
    )
    torch.library.opcheck(operators.rmsnorm_forward, (x, weight, EPS, False), test_utils=checks)
    torch.library.opcheck(
        operators.rmsnorm_backward, (dy, x, rstdev, weight, x, False, False), test_utils=checks
    )


def _request(device="cuda", dtype=torch.bfloat16):
    layout = ((4, 8), (8, 1), dtype)
    return NormRequest("rmsnorm_forward", *layout, torch.bfloat16, torch.device(device), False)


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    assert "on cpu" in (triton.unsupported_reason(_request("cpu")) or "")
    x = torch.randn(2, 8)
    with use_backend(norm="triton"), pytest.raises(Unsupported, match="needs a CUDA device"):
        norm.rmsnorm_forward(x, torch.ones(8), EPS, False)


def test_a_missing_triton_is_a_rejection(monkeypatch):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: "triton is not installed")
    assert triton.unsupported_reason(_request()) == "triton is not installed"


@pytest.mark.parametrize("capability, selection", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_devices_and_float64_are_rejected(monkeypatch, capability, selection):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: None)
    monkeypatch.setattr(launching, "current_hardware", lambda: nvidia(*capability))
    assert (triton.unsupported_reason(_request()) is None) == selection
    assert "float64" in (triton.unsupported_reason(_request(dtype=torch.float64)) or "")

"""Casts, norms, activations and dropout under the extension's names, against plain torch formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import transformer_engine_torch as tex
from transformer_engine.pytorch import Float8CurrentScalingQuantizer

FP8 = tex.DType.kFloat8E4M3
BF16 = tex.DType.kBFloat16


def sample(device, *shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.fixture
def quantizer(device):
    return Float8CurrentScalingQuantizer(FP8, device=device)


def same(one, other):
    return torch.equal(one.dequantize(), other.dequantize())


def test_the_quantize_function_equals_the_quantizer(quantizer, device):
    x = sample(device, 32, 64)
    expected = quantizer(x)
    assert same(tex.quantize(x, quantizer), expected)
    out = tex.create_empty_quantized_tensor(quantizer, [32, 64], tex.DType.kFloat32, device)
    tex.quantize(x, quantizer, out)
    assert same(out, expected) and out.dtype == torch.float32
    tex.quantize(2 * x, quantizer, out, torch.ones(1, device=device))
    assert same(out, expected)
    tex.quantize(2 * x, quantizer, out, torch.zeros(1, device=device))
    assert not same(out, expected)
    back = tex.dequantize(expected, BF16)
    assert back.dtype == torch.bfloat16 and torch.equal(
        back, expected.dequantize(dtype=torch.bfloat16)
    )


def test_parts_are_quantized_one_by_one(quantizer, device):
    x = sample(device, 64, 32)
    x[32:] *= 100
    parts = tex.split_quantize(x, [32, 16, 16], [quantizer] * 3)
    for part, rows in zip(parts, x.split([32, 16, 16]), strict=True):
        assert same(part, quantizer(rows))
    many = tex.multi_tensor_quantize([x, 2 * x], [quantizer, None])
    assert same(many[0], quantizer(x)) and torch.equal(many[1], 2 * x)


def test_the_bias_gradient_is_the_sum_over_rows(quantizer, device):
    x = sample(device, 2, 16, 32, dtype=torch.bfloat16)
    bias_gradient, quantized = tex.bgrad_quantize(x, quantizer)
    assert bias_gradient.dtype == torch.bfloat16
    torch.testing.assert_close(bias_gradient, x.float().sum(dim=(0, 1)).to(torch.bfloat16))
    assert same(quantized, quantizer(x))


def test_codes_and_axes_are_transposed(device):
    codes = torch.arange(24, dtype=torch.uint8, device=device).view(2, 3, 4)
    expected = codes.view(6, 4).t()
    assert torch.equal(tex.fp8_transpose(codes, FP8), expected)
    out = torch.empty(4, 6, dtype=torch.uint8, device=device)
    assert tex.fp8_transpose(codes, FP8, out=out) is out and torch.equal(out, expected)
    swapped = tex.swap_first_dims(codes)
    assert torch.equal(swapped, codes.transpose(0, 1)) and swapped.is_contiguous()
    amax = torch.zeros(1, device=device)
    tex.compute_amax(torch.tensor([[1.0, -3.5], [2.0, 0.0]], device=device), amax)
    assert amax.item() == 3.5


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_and_their_gradients(kind, zero_centered, quantizer, device):
    x, gamma, beta = sample(device, 6, 32), sample(device, 32, seed=1), sample(device, 32, seed=2)
    leaves = [t.double().requires_grad_() for t in (x, gamma, beta)]
    mean = leaves[0].mean(-1, keepdim=True) if kind == "layernorm" else 0.0
    deviation = (leaves[0] - mean).square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    expected = (leaves[0] - mean) * deviation * (leaves[1] + float(zero_centered))
    if kind == "layernorm":
        expected = expected + leaves[2]
        forward = (x, gamma, beta, 1e-5)
    else:
        leaves.pop()
        forward = (x, gamma, 1e-5)
    call = getattr(tex, kind + "_fwd")
    out, mu, rsigma = call(*forward, None, None, tex.DType.kFloat32, 0, zero_centered)
    torch.testing.assert_close(out.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rsigma.double(), deviation.detach().flatten(), atol=1e-5, rtol=1e-5)
    assert (mu is None) == (kind == "rmsnorm")
    quantized = call(*forward, None, quantizer, BF16, 0, zero_centered)[0]
    assert same(quantized, quantizer(out.to(torch.bfloat16)))
    buffer = torch.empty_like(out)
    assert call(*forward, buffer, None, tex.DType.kFloat32, 0, zero_centered)[0] is buffer
    grad = sample(device, 6, 32, seed=3)
    reference = torch.autograd.grad(expected, leaves, grad.double())
    statistics = (rsigma,) if mu is None else (mu, rsigma)
    actual = getattr(tex, kind + "_bwd")(grad, x, *statistics, gamma, 0, zero_centered)
    for ours, original in zip(actual, reference, strict=True):
        torch.testing.assert_close(ours.double(), original, atol=1e-4, rtol=1e-4)
    if kind == "rmsnorm":
        added = tex.rmsnorm_bwd_add(grad, x, grad, rsigma, gamma, 0, zero_centered)
        torch.testing.assert_close(
            added[0].double(), reference[0] + grad.double(), atol=1e-4, rtol=1e-4
        )


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": quick_gelu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {
    "geglu": PLAIN["gelu"],
    "qgeglu": quick_gelu,
    "reglu": F.relu,
    "sreglu": PLAIN["srelu"],
    "swiglu": F.silu,
    "glu": torch.sigmoid,
}


def clamped(x, limit=7.0, alpha=1.702, offset=1.0):
    first, gate = x.chunk(2, dim=-1)
    first, gate = first.clamp(max=limit), gate.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (gate + offset)


def formula(name):
    if name in PLAIN:
        return PLAIN[name]
    return lambda x: GATES[name](x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]


@pytest.mark.parametrize("name", [*PLAIN, *GATES])
def test_activations_and_their_gradients(name, quantizer, device):
    x = sample(device, 16, 32)
    wide = x.double().requires_grad_()
    expected = formula(name)(wide)
    out = getattr(tex, name)(x, None)
    torch.testing.assert_close(out.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    grad = sample(device, *out.shape, seed=1)
    (reference,) = torch.autograd.grad(expected, wide, grad.double())
    actual = getattr(tex, f"d{name}")(grad, x, None)
    torch.testing.assert_close(actual.double(), reference, atol=1e-5, rtol=1e-5)
    assert same(getattr(tex, name)(x, quantizer), quantizer(out))
    if name in PLAIN:
        bias_gradient, quantized = getattr(tex, f"dbias_d{name}")(grad, x, quantizer)
        torch.testing.assert_close(bias_gradient, actual.sum(dim=0), atol=1e-5, rtol=1e-5)
        assert same(quantized, quantizer(actual))


@pytest.mark.parametrize("options", [{}, {"limit": 1.0, "alpha": 2.0, "glu_linear_offset": 0.5}])
def test_the_clamped_unit_takes_its_constants(options, device):
    x = 3 * sample(device, 16, 32)
    wide = x.double().requires_grad_()
    expected = clamped(wide, *(options.values()))
    torch.testing.assert_close(
        tex.clamped_swiglu(x, None, **options).double(), expected.detach(), atol=1e-5, rtol=1e-5
    )
    grad = sample(device, 16, 16, seed=1)
    (reference,) = torch.autograd.grad(expected, wide, grad.double())
    actual = tex.clamped_dswiglu(grad, x, None, **options)
    torch.testing.assert_close(actual.double(), reference, atol=1e-5, rtol=1e-5)


def test_dropout_keeps_its_share_and_its_mask(device):
    x = torch.ones(64, 128, device=device)
    out, mask = tex.dropout_fwd(x, 0.25)
    saved = out != 0
    assert mask.dtype == torch.uint8 and mask.numel() == x.numel() // 8
    torch.testing.assert_close(out[saved], torch.full_like(out[saved], 1 / 0.75))
    share = saved.float().mean().item()
    assert abs(share - 0.75) < 5 * math.sqrt(0.25 * 0.75 / x.numel())
    grad = sample(device, 64, 128)
    torch.testing.assert_close(
        tex.dropout_bwd(grad, mask, 0.25), torch.where(saved, grad / 0.75, 0.0)
    )
    buffer = torch.empty_like(grad)
    assert torch.equal(tex.dropout_bwd(grad, mask, 0.25, buffer), buffer)

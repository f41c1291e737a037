"""Calls of the extension's functions that the original computes: each is accepted and compared with an oracle."""

from __future__ import annotations

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex

E4M3 = te.DType.kFloat8E4M3


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32)])
@pytest.mark.parametrize("eps", [torch.tensor(1e-5), numpy.float32(1e-5)])
def test_norms_flatten_leading_axes(shape, eps):
    x, gamma, beta, dy = (
        sample(*shape),
        sample(32, seed=1),
        sample(32, seed=2),
        sample(*shape, seed=3),
    )
    leaf = x.double().requires_grad_()
    layer_norm = torch.nn.functional.layer_norm(leaf, (32,), gamma.double(), beta.double(), 1e-5)
    out, mu, rsigma = tex.layernorm_fwd(
        x, gamma, beta, eps, None, None, tex.DType.kFloat32, 0, False
    )
    torch.testing.assert_close(out.double(), layer_norm, atol=1e-5, rtol=1e-5)
    (expected,) = torch.autograd.grad(layer_norm, leaf, dy.double())
    actual = tex.layernorm_bwd(dy, x, mu, rsigma, gamma, 0, False)[0]
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    rms_norm = torch.nn.functional.rms_norm(leaf, (32,), gamma.double(), 1e-5)
    out, _, rsigma = tex.rmsnorm_fwd(x, gamma, eps, None, None, tex.DType.kFloat32, 0, False)
    torch.testing.assert_close(out.double(), rms_norm, atol=1e-5, rtol=1e-5)
    (expected,) = torch.autograd.grad(rms_norm, leaf, dy.double())
    for actual in (
        tex.rmsnorm_bwd(dy, x, rsigma, gamma, 0, False)[0],
        tex.rmsnorm_bwd_add(dy, x, x, rsigma, gamma, 0, False)[0] - x,
    ):
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dgelu", "dswiglu", "clamped_dswiglu"])
def test_a_gradient_may_have_its_leading_axes_flattened(name):
    x, dy = sample(2, 3, 32), sample(2, 3, 32 if name == "dgelu" else 16, seed=1)
    function = getattr(tex, name)
    result = function(dy.flatten(0, 1), x, None)
    assert result.shape == x.shape
    assert torch.equal(result, function(dy, x, None))


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 8),
        [4.0, 8.0],
        numpy.array([4, 8]),
        torch.tensor([4, 8]),
        [numpy.int32(4), torch.tensor(8)],
    ],
)
def test_parts_may_leave_rows_out(sizes):
    x = sample(16, 32)
    quantizers = [te.Float8CurrentScalingQuantizer(E4M3), None]
    first, second = tex.split_quantize(x, sizes, quantizers)
    assert torch.equal(
        first.dequantize(), te.Float8CurrentScalingQuantizer(E4M3)(x[:4]).dequantize()
    )
    assert torch.equal(second, x[4:12])
    assert tex.split_quantize(x, [], []) == []


@pytest.mark.parametrize("p", [torch.tensor(0.25), numpy.float64(0.25)])
def test_dropout_takes_scalars_of_any_library(p):
    x = torch.ones(4096)
    y, mask = tex.dropout_fwd(x, p)
    saved = y != 0
    assert 0.7 < float(saved.float().mean()) < 0.8
    torch.testing.assert_close(y[saved], torch.full_like(y[saved], 1 / 0.75))
    torch.testing.assert_close(tex.dropout_bwd(x, mask, p), y)


@pytest.mark.parametrize("count", [-2, 0, 5.0, numpy.int64(5), torch.tensor(5)])
def test_permuted_rows_are_counted_in_every_form(count):
    x, experts = sample(3, 8), torch.tensor([[1, 0], [0, 2], [2, 1]], dtype=torch.int32)
    y, rows, _ = tex.moe_permute_fwd(x, tex.DType.kFloat32, experts, count, [], 0)
    order = experts.flatten().sort(stable=True).indices
    expected = x[order // 2]
    torch.testing.assert_close(y, expected[: int(count)] if count > 0 else expected, rtol=0, atol=0)
    if count <= 0:
        back = tex.moe_unpermute_fwd(
            y, tex.DType.kFloat32, rows, None, torch.tensor(3), numpy.int64(2)
        )
        torch.testing.assert_close(back, 2 * x)


@pytest.mark.parametrize("form", [numpy.array, torch.tensor, lambda rows: [float(n) for n in rows]])
def test_rows_of_padded_groups_may_be_given_in_every_form(form):
    x = sample(5, 4)
    padded = torch.full((8, 4), torch.nan)
    tex.fused_multi_row_padding(x, padded, form([3, 2]), form([4, 4]))
    expected = torch.cat((x[:3], torch.zeros(1, 4), x[3:], torch.zeros(2, 4)))
    assert torch.equal(padded, expected)
    back = torch.empty_like(x)
    tex.fused_multi_row_unpadding(padded, back, form([4, 4]), form([3, 2]))
    assert torch.equal(back, x)

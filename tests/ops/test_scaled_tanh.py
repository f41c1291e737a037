"""ScaledTanhSReLU, its arguments, and the modules in which the original has the operations."""

from __future__ import annotations

import importlib

import pytest
import torch

from transformer_engine.pytorch import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [0.5, 3.0])
def test_values_and_gradients_equal_float64(dtype, clamp, device):
    generator = torch.Generator().manual_seed(3)
    x = (3 * torch.randn(3, 5, 16, generator=generator)).to(device, dtype).requires_grad_()
    scales = torch.rand(3, 5, generator=generator).to(device).requires_grad_()
    dy = torch.randn(3, 5, 16, generator=generator).to(device, dtype)
    wide, wide_scales = (t.detach().double().requires_grad_() for t in (x, scales))
    expected = (clamp * torch.tanh(wide.relu() / clamp)).square() * wide_scales[..., None]
    expected.backward(dy.double())
    y = ops.ScaledTanhSReLU(tanh_clamp_scale=clamp)(x, scales)
    y.backward(dy)
    assert y.dtype == dtype and scales.grad.dtype == torch.float32
    exact = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    )
    torch.testing.assert_close(y.double(), expected, **exact)
    torch.testing.assert_close(x.grad.double(), wide.grad, **exact)
    torch.testing.assert_close(scales.grad.double(), wide_scales.grad, rtol=1e-5, atol=1e-4)


def test_scaled_tanh_in_a_chain_has_finite_difference_gradients(device):
    torch.manual_seed(1)
    chain = ops.Sequential(
        ops.Linear(4, 8, device=device),
        ops.ScaledTanhSReLU(tanh_clamp_scale=1.5),
        ops.Linear(8, 2, device=device),
    )
    x, scales = torch.randn(3, 4, device=device, requires_grad=True), torch.rand(3, device=device)
    chain(x, scales).sum().backward()
    step = torch.zeros_like(x)
    step[1, 2] = 1e-2
    with torch.no_grad():
        slope = (chain(x + step, scales).sum() - chain(x - step, scales).sum()) / 2e-2
    torch.testing.assert_close(x.grad[1, 2], slope, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("clamp", [0.0, -1.0, float("inf"), float("nan")])
def test_the_bound_is_finite_and_positive(clamp):
    with pytest.raises(ValueError, match="tanh_clamp_scale"):
        ops.ScaledTanhSReLU(tanh_clamp_scale=clamp)


def test_scales_need_one_number_per_row():
    with pytest.raises(ValueError, match="give one scale per row"):
        ops.ScaledTanhSReLU(tanh_clamp_scale=1.0)(torch.ones(3, 4), torch.ones(2))


@pytest.mark.parametrize(
    "kind", [ops.ScaledSReLU, lambda **o: ops.ScaledTanhSReLU(tanh_clamp_scale=2.0, **o)]
)
def test_recomputation_outside_of_a_fused_mlp_warns_and_proceeds(kind, monkeypatch):
    monkeypatch.setattr("transformer_engine.common.warning._issued", set())
    x, scales = torch.randn(2, 8), torch.rand(2)
    with pytest.warns(UserWarning, match="activation_recompute_in_mlp=True of .* has no effect"):
        y = kind(activation_recompute_in_mlp=True)(x, scales)
    assert torch.equal(y, kind()(x, scales))


PATHS = {
    "basic": "activation add_extra_input all_gather all_reduce basic_linear bias constant_scale dropout grouped_linear "
    "identity l2normalization layer_norm make_extra_output quantize reduce_scatter reshape rmsnorm swiglu",
    "fused": "backward_activation_bias backward_add_rmsnorm backward_linear_add backward_linear_scale "
    "forward_linear_bias_activation forward_linear_bias_add forward_linear_scale_add grouped_mlp "
    "userbuffers_backward_linear userbuffers_forward_linear",
}


@pytest.mark.parametrize(
    "path", [f"{folder}.{name}" for folder, names in PATHS.items() for name in names.split()]
)
def test_operations_have_the_originals_module_paths(path):
    importlib.import_module(f"transformer_engine.pytorch.ops.{path}")

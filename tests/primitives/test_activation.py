"""The twelve activations: values and gradients against float64 autograd, limits where they have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.tolerances import CURVED, DTYPES
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives.activation import (
    ACTIVATIONS,
    TABLE,
    ActivationParams,
    ActivationRequest,
    activation_backward,
    activation_forward,
    reference,
)

NAMES = pytest.mark.parametrize("name", list(ACTIVATIONS))
TIGHT = ActivationParams(limit=1.0, alpha=1.3, offset=0.25)

CURVES = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}
GATES = {
    "geglu": CURVES["gelu"],
    "glu": torch.sigmoid,
    "qgeglu": CURVES["qgelu"],
    "reglu": CURVES["relu"],
    "sreglu": CURVES["srelu"],
    "swiglu": CURVES["silu"],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


def _torch(name, x, params):
    if name in CURVES:
        return CURVES[name](x)
    gate, linear = x.chunk(2, -1)
    if name in GATES:
        return GATES[name](gate) * linear
    gate = gate.clamp(max=params.limit)
    linear = linear.clamp(-params.limit, params.limit)
    return gate * torch.sigmoid(params.alpha * gate) * (linear + params.offset)


def _close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, rtol=CURVED[dtype], atol=CURVED[dtype])


@NAMES
@DTYPES
@pytest.mark.parametrize("shape", [(2,), (5, 34), (2, 3, 16), (0, 8)], ids=str)
def test_value_and_gradient_equal_float64_autograd(name, dtype, shape, device):
    x = torch.randn(shape, device=device).mul(2.0).to(dtype)
    x64 = x.double().requires_grad_()
    expected = _torch(name, x64, TIGHT)
    dy = torch.randn(expected.shape, device=device).to(dtype)
    expected.backward(dy.double())

    y = activation_forward(name, x, TIGHT)
    dx = activation_backward(name, dy, x, TIGHT)

    assert y.dtype == dx.dtype == dtype and y.shape == expected.shape and dx.shape == x.shape
    _close(y, expected.detach(), dtype)
    _close(dx, x64.grad, dtype)


@pytest.mark.parametrize("name", ["geglu", "reglu", "swiglu", "glu"])
def test_the_first_half_is_activated_and_the_second_is_the_linear_gate(name, device):
    first, second = torch.tensor([[-1.0]], device=device), torch.tensor([[3.0]], device=device)
    expected = GATES[name](first) * second
    torch.testing.assert_close(activation_forward(name, torch.cat((first, second), -1)), expected)


def test_clamped_swiglu_by_hand(device):
    x = torch.tensor([[9.0, -9.0, 2.0, 9.0, -9.0, 1.0]], device=device)
    gate, linear = torch.tensor([7.0, -9.0, 2.0]), torch.tensor([7.0, -7.0, 1.0])
    expected = gate / (1.0 + torch.exp(-1.702 * gate)) * (linear + 1.0)
    torch.testing.assert_close(activation_forward("clamped_swiglu", x)[0].cpu(), expected)


def test_clamped_swiglu_has_a_gradient_up_to_its_limit(device):
    # A gate below -limit is not clamped; both halves are free at exactly their limits.
    x = torch.tensor([[7.5, -7.5, 7.0, 7.5, -7.5, 7.0]], device=device)
    dx = activation_backward("clamped_swiglu", torch.ones(1, 3, device=device), x)[0]
    assert dx[0] == 0 and dx[1] != 0 and dx[2] != 0
    assert dx[3] == 0 and dx[4] == 0 and dx[5] != 0


def test_reference_autograd_has_the_same_derivative_at_the_bounds():
    x = torch.tensor([[7.5, 7.0, 7.0, 2.0, 7.5, 7.0, -7.0, -7.5]], requires_grad=True)
    constants = (7.0, 1.702, 1.0)
    (recorded,) = torch.autograd.grad(reference.value("clamped_swiglu", x, constants).sum(), x)
    ours = reference.gradient("clamped_swiglu", torch.ones(1, 4), x.detach(), constants)
    torch.testing.assert_close(ours, recorded)
    assert recorded[0, 1] != 0 and recorded[0, 5] != 0 and recorded[0, 6] != 0


def test_relu_has_slope_zero_at_zero(device):
    zero = torch.zeros(1, 2, device=device)
    assert not activation_backward("relu", torch.ones_like(zero), zero).any()


@NAMES
def test_large_inputs_do_not_overflow_the_gradient(name, device):
    x = torch.tensor([[-80.0, 80.0, -80.0, 80.0]], device=device)
    dy = torch.ones(activation_forward(name, x).shape, device=device)
    assert activation_backward(name, dy, x).isfinite().all()


@NAMES
@DTYPES
@pytest.mark.parametrize("backend", TABLE.names())
def test_every_backend_agrees_with_the_reference(backend, name, dtype, device):
    x = torch.randn(19, 160, device=device).to(dtype)
    dy = torch.randn(19, 80 if ACTIVATIONS[name].gated else 160, device=device).to(dtype)
    for backward in (False, True):
        reason = TABLE.named(backend).unsupported_reason(
            ActivationRequest(name, backward, x.shape, x.stride(), dtype, x.device)
        )
        if reason is not None:
            pytest.skip(reason)
    results = []
    for choice in ("reference", backend):
        with use_backend(activation=choice):
            results.append(
                (activation_forward(name, x, TIGHT), activation_backward(name, dy, x, TIGHT))
            )
    for expected, actual in zip(*results, strict=True):
        _close(actual, expected.double(), dtype)


def test_a_strided_input_equals_its_contiguous_copy(device):
    x = torch.randn(16, 6, device=device)
    strided = x.t().contiguous().t()
    assert torch.equal(activation_forward("swiglu", strided), activation_forward("swiglu", x))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="clamped_swiglu"):
        activation_forward("mish", torch.zeros(2))


def test_a_gated_activation_rejects_an_odd_width():
    with pytest.raises(ValueError, match="odd"):
        activation_forward("swiglu", torch.zeros(2, 3))


def test_activation_parameters_come_from_the_users_dict():
    params = ActivationParams.from_mapping({"limit": 5, "alpha": 1.5, "glu_linear_offset": 0.0})
    assert params == ActivationParams(5.0, 1.5, 0.0)
    assert ActivationParams.from_mapping(None) == ActivationParams(7.0, 1.702, 1.0)
    with pytest.raises(ValueError, match="beta"):
        ActivationParams.from_mapping({"beta": 1.0})

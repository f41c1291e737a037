"""The Triton activations against the float32 reference: on a GPU, and on small shapes in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, ROUNDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives import activation
from transformer_engine.pytorch.primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
    ActivationRequest,
    reference,
    triton,
)

# One unit in the last place of the output format. The absolute part is float32's own: the reference's
# 1 + tanh(u) and slopes near their zeros cancel to about 1e-7 of the terms.
NAMES = pytest.mark.parametrize("name", list(ACTIVATIONS))
SMALL = [(), (1,), (3, 31), (2, 3, 32), (5, 33), (1, 2049)]
LARGE = [(70000, 2), (513, 2047), (64, 14336), (3, 4, 4097)]
SHAPES = parametrize_sizes("shape", SMALL, LARGE, ids=str)
kernels = Kernels(activation, "activation")
PARAMS = ActivationParams(limit=2.0, alpha=1.5, offset=0.5)


def _inputs(name, shape, dtype):
    if ACTIVATIONS[name].gated:
        if not shape:
            pytest.skip("a gated unit halves the last dimension, and a number has none")
        x = torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE) * 4.0
    else:
        x = torch.randn(shape, device=DEVICE) * 4.0
    return x.to(dtype), torch.randn(shape, device=DEVICE).to(dtype)


def _close(actual, expected, magnitude):
    tolerance = ROUNDED[actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=1e-6 * magnitude
    )


@runs_kernels
@NAMES
@SHAPES
@DTYPES
def test_values_and_gradients_equal_the_reference_to_the_last_place(name, shape, dtype):
    x, dy = _inputs(name, shape, dtype)
    magnitude = max(1.0, x.abs().max().item() ** 2)
    y = kernels.activation_forward(name, x, PARAMS)
    dx = kernels.activation_backward(name, dy, x, PARAMS)
    assert y.dtype == dx.dtype == dtype and y.shape == dy.shape and dx.shape == x.shape
    _close(y, reference.value(name, x, PARAMS.constants), magnitude)
    _close(dx, reference.gradient(name, dy, x, PARAMS.constants), magnitude**2)


@runs_kernels
@NAMES
def test_extreme_values_equal_the_reference(name):
    special = torch.tensor(
        [0.0, -0.0, 1e4, -1e4, 88.0, -88.0, 2.0, -2.0, float("nan"), float("inf")]
    )
    x = special.repeat(2).to(DEVICE) if ACTIVATIONS[name].gated else special.to(DEVICE)
    dy = torch.ones(special.shape[0], device=DEVICE)
    actual = kernels.activation_forward(name, x, PARAMS)
    expected = reference.value(name, x, PARAMS.constants)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    actual = kernels.activation_backward(name, dy, x, PARAMS)[:-1]
    expected = reference.gradient(name, dy, x, PARAMS.constants)[:-1]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@runs_kernels
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_strided_inputs_are_bitwise_equal_to_contiguous_ones(name):
    x, dy = _inputs(name, (6, 40), torch.bfloat16)
    y, dx = (
        kernels.activation_forward(name, x, PARAMS),
        kernels.activation_backward(name, dy, x, PARAMS),
    )
    for separate in (
        lambda t: torch.cat((t, t), dim=1)[:, : t.shape[1]],
        lambda t: t.t().contiguous().t(),
    ):
        assert not separate(x).is_contiguous()
        assert torch.equal(kernels.activation_forward(name, separate(x), PARAMS), y)
        assert torch.equal(kernels.activation_backward(name, separate(dy), separate(x), PARAMS), dx)


@runs_kernels
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_zero_rows_give_an_empty_result(name):
    x, dy = _inputs(name, (0, 8), torch.bfloat16)
    assert kernels.activation_forward(name, x, PARAMS).shape == (0, 8)
    assert kernels.activation_backward(name, dy, x, PARAMS).shape == x.shape


@pytest.mark.gpu
def test_compiled_code_launches_the_same_kernels_without_a_graph_break():
    x, dy = _inputs("clamped_swiglu", (32, 96), torch.bfloat16)

    def both(x, dy):
        y = activation.activation_forward("clamped_swiglu", x, PARAMS)
        return y, activation.activation_backward("clamped_swiglu", dy, x, PARAMS)

    with use_backend(activation="triton"):
        eager, compiled = both(x, dy), torch.compile(both, fullgraph=True)(x, dy)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_a_tensor_on_the_cpu_is_rejected_with_the_reason():
    request = ActivationRequest(
        "gelu", False, torch.Size((2, 8)), (8, 1), torch.float32, torch.device("cpu")
    )
    assert "on cpu" in (triton.unsupported_reason(request) or "")

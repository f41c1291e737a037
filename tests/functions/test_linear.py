"""Operands in a linear layer's three products, compared with operands quantized by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transformer_engine.common.dispatch import observing
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.distributed.tensor_parallel import TensorParallel
from transformer_engine.pytorch.functions import communication
from transformer_engine.pytorch.functions.linear import linear
from transformer_engine.pytorch.functions.linear_spec import IDENTITY, Accumulation, LinearSpec
from transformer_engine.pytorch.functions.weight_gradient import WeightGradient
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.primitives.quantize import dequantize
from transformer_engine.pytorch.quantization import RecipeState

RECIPES = {
    "delayed": DelayedScaling(),
    "delayed_e4m3": DelayedScaling(fp8_format=Format.E4M3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    # Stochastic rounding draws new numbers for every quantization, so the oracle could not follow.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
M, N, K = 64, 96, 32 * 4


def make_spec(dtype=torch.bfloat16, qx=IDENTITY, qw=IDENTITY, qg=IDENTITY, **options):
    return LinearSpec(
        dtype, qx, qw, qg, Accumulation(), TensorParallel(), WeightGradient(), **options
    )


def quantizers(recipe, device):
    forward = RecipeState.create(
        recipe, mode="forward", num_quantizers=3, device=device
    ).make_quantizers()
    backward = RecipeState.create(
        recipe, mode="backward", num_quantizers=2, device=device
    ).make_quantizers()
    return forward[0], forward[1], backward[0]


def tensors(device, dtype=torch.bfloat16):
    x = torch.randn(M, K, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(N, K, device=device, dtype=dtype).mul_(0.05).requires_grad_()
    b = torch.randn(N, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(M, N, device=device, dtype=dtype)
    return x, w, b, dy


def values(quantizer, matrix, columnwise):
    """The matrix that a product reads, in float64; by columns its transpose."""
    if quantizer is IDENTITY:
        return (matrix.t() if columnwise else matrix).double()
    operand = quantizer.encode(matrix.detach(), not columnwise, columnwise)
    operand = operand.contract(COLUMNWISE if columnwise else ROWWISE)
    return dequantize(operand._replace(dtype=torch.float32)).double()


@pytest.mark.parametrize("name", RECIPES)
def test_each_product_reads_its_operands_as_quantized(name, device):
    x, w, b, dy = tensors(device)
    qx, qw, qg = quantizers(RECIPES[name], device)
    spec = make_spec(torch.bfloat16, qx, qw, qg, needs_grad_bias=True)
    y = linear(x, w, b, spec)
    y.backward(dy)

    expected_y = values(qx, x, False) @ values(qw, w, False).t() + b.detach().double()
    expected_dx = values(qg, dy, False) @ values(qw, w, True).t()
    expected_dw = values(qg, dy, True) @ values(qx, x, True).t()
    for got, expected in ((y, expected_y), (x.grad, expected_dx), (w.grad, expected_dw)):
        # Half a unit in the last place of bfloat16, and a little for the float32 summation order.
        torch.testing.assert_close(
            got.double(), expected, rtol=2**-8, atol=2e-3 * float(expected.abs().max())
        )
    torch.testing.assert_close(b.grad.double(), dy.double().sum(0), rtol=2**-8, atol=1e-6)


def test_without_quantizers_results_equal_torch_linear(device):
    x, w, b, dy = tensors(device, torch.float32)
    y = linear(x, w, b, make_spec(torch.float32, needs_grad_bias=True))
    y.backward(dy)
    got = [y, x.grad.clone(), w.grad.clone(), b.grad.clone()]
    for t in (x, w, b):
        t.grad = None
    expected = torch.nn.functional.linear(x, w, b)
    expected.backward(dy)
    for a, e in zip(got, [expected, x.grad, w.grad, b.grad], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ["high_precision", "dequantized"])
def test_a_backward_override_leaves_gradients_unquantized(mode, device):
    x, w, _, dy = tensors(device)
    qx, qw, qg = quantizers(RECIPES["current"], device)
    linear(x, w, None, make_spec(torch.bfloat16, qx, qw, qg, backward_operands=mode)).backward(dy)
    x_values, w_values = x.detach(), w.detach()
    if mode == "dequantized":
        x_values = qx.encode(x_values, True, False).dequantize(dtype=torch.bfloat16)
        w_values = qw.encode(w_values, True, False).dequantize(dtype=torch.bfloat16)
    torch.testing.assert_close(x.grad, dy @ w_values)
    torch.testing.assert_close(w.grad, dy.t() @ x_values)


def test_keeping_the_input_does_not_change_gradients(device):
    results = []
    for keep in (False, True):
        torch.manual_seed(0)
        x, w, _, dy = tensors(device)
        qx, qw, qg = quantizers(RECIPES["block"], device)
        linear(x, w, None, make_spec(torch.bfloat16, qx, qw, qg, keep_input=keep)).backward(dy)
        results.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["input only", "weight only"])
def test_only_wanted_gradients_are_computed(needs, device):
    x, w, _, dy = tensors(device)
    x.requires_grad_(needs[0])
    w.requires_grad_(needs[1])
    qx, qw, qg = quantizers(RECIPES["current"], device)
    spec = make_spec(
        torch.bfloat16, qx, qw, qg, needs_grad_input=needs[0], needs_grad_weight=needs[1]
    )
    linear(x, w, None, spec).backward(dy)
    assert (x.grad is not None, w.grad is not None) == needs


def test_leading_dimensions_are_restored(device):
    x = torch.randn(3, 5, K, device=device, requires_grad=True)
    w = torch.randn(N, K, device=device, requires_grad=True)
    y = linear(x, w, None, make_spec(torch.float32))
    assert y.shape == (3, 5, N)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("rows", [(M,), (4, M // 4)], ids=str)
def test_a_product_writes_codes_under_delayed_scaling(rows, device):
    x, w, b, _ = tensors(device)
    quantized = {}
    for name in ("delayed", "current"):
        forward = RecipeState.create(RECIPES[name], mode="forward", num_quantizers=3, device=device)
        backward = RecipeState.create(
            RECIPES[name], mode="backward", num_quantizers=2, device=device
        )
        qx, qw, qy = forward.make_quantizers()
        qg, qdx = backward.make_quantizers()
        spec = make_spec(
            torch.bfloat16,
            qx,
            qw,
            qg,
            output_quantizer=qy,
            grad_input_quantizer=qdx,
            needs_grad_bias=True,
        )
        records = []
        with observing(
            lambda operation, request, observed=records: observed.append((operation, request))
        ):
            y = linear(x.view(*rows, K), w, b, spec)
            (dx,) = torch.autograd.grad(y, x, torch.ones(y.shape, device=device, dtype=y.dtype))
        kinds = [request.kind for operation, request in records if operation == "gemm_epilogue"]
        assert kinds == (["codes", "codes"] if name == "delayed" else [])
        assert y.shape == (*rows, N) and y.dtype == torch.bfloat16 and dx.shape == x.shape
        assert y.get_usages() == {"rowwise": True, "columnwise": True}
        quantized[name] = (y, dx, forward)
    y, dx, state = quantized["delayed"]
    exact = x.detach().double() @ w.detach().double().t() + b.detach().double()
    for got, other in ((y, quantized["current"][0]), (dx, quantized["current"][1])):
        got, other = (t.detach().to(torch.float64) for t in (got, other))
        assert float((got.view_as(other) - other).norm()) < 0.1 * float(other.norm())
    recorded = float(state.amax_history[0, 2])
    assert recorded == pytest.approx(float(exact.abs().max()), rel=0.1)


@pytest.mark.parametrize(("mode", "expected"), [("row", []), ("column", ["codes"])])
def test_a_partial_sum_is_not_quantized_before_reduction(mode, expected, device, monkeypatch):
    x, w, _, _ = tensors(device)
    state = RecipeState.create(RECIPES["delayed"], mode="forward", num_quantizers=3, device=device)
    qx, qw, qy = state.make_quantizers()
    monkeypatch.setattr(TensorParallel, "checked_group", lambda self: None)
    monkeypatch.setitem(
        communication.COLLECTIVES, "all_reduce", lambda tensor, group, later: (tensor * 2, None)
    )
    spec = dataclasses.replace(
        make_spec(torch.bfloat16, qx, qw, IDENTITY, output_quantizer=qy),
        parallel=TensorParallel(mode, None, 2),
    )
    records = []
    with (
        observing(lambda operation, request: records.append((operation, request))),
        torch.no_grad(),
    ):
        linear(x, w, None, spec)
    assert [
        request.kind for operation, request in records if operation == "gemm_epilogue"
    ] == expected

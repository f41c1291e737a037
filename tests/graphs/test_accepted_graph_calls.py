"""make_graphed_callables: calls and results that the original accepts, against eager calls."""

from __future__ import annotations

import copy
import warnings

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import warning
from transformer_engine.common.recipe import Float8CurrentScaling


@pytest.fixture(autouse=True)
def _warnings_start_anew(monkeypatch):
    monkeypatch.setattr(warning, "_issued", set())


def sample(seed=0):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def layers(count):
    torch.manual_seed(0)
    eager = torch.nn.ModuleList([te.Linear(16, 16, device="cpu") for _ in range(count)])
    return eager, copy.deepcopy(eager)


ORDERS = {
    "floats": [1.0, 2.0, -2.0, -1.0],
    "array": numpy.array([1, 2, -2, -1]),
    "tensor": torch.tensor([1, 2, -2, -1]),
    "scalars": (numpy.int64(1), torch.tensor(2), numpy.float32(-2), -1),
}
SIZES = {
    "scalar": numpy.int64(1),
    "float": 1.0,
    "array": numpy.array([1, 1]),
    "tensors": [torch.tensor(1), 1],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_an_order_accepts_all_number_types(order, sizes, rerun):
    eager, graphed = layers(2)
    samples = tuple((sample(i).requires_grad_(),) for i in range(2))
    result = te.make_graphed_callables(
        tuple(graphed),
        samples,
        _order=ORDERS[order],
        _num_layers_per_chunk=SIZES[sizes],
        num_warmup_iters=torch.tensor(2),
        allow_unused_input=numpy.bool_(False),
    )
    x, e = sample(3).requires_grad_(), sample(3).requires_grad_()
    actual, expected = result[1](result[0](x)), eager[1](eager[0](e))
    assert torch.equal(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(x.grad, e.grad)


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([None], TypeError, r"_order\[0\]=None must be a number"),
        ([1, "two"], TypeError, r"_order\[1\]='two' must be a number"),
        ([1, float("nan")], ValueError, r"_order\[1\]=nan is not finite"),
        ([1, torch.ones(2)], TypeError, r"_order\[1\]=a Tensor of shape \[2\]"),
        (7, TypeError, "_order=7 is not a sequence; give a list of numbers"),
    ],
)
def test_an_invalid_order_is_named(order, error, message):
    _, graphed = layers(1)
    with pytest.raises(error, match=message):
        te.make_graphed_callables(tuple(graphed), ((sample(),),), _order=order)


def test_chunk_sizes_without_an_order_warn_once(rerun):
    eager, graphed = layers(1)
    with pytest.warns(UserWarning, match="_num_layers_per_chunk has no effect without _order"):
        result = te.make_graphed_callables(graphed[0], (sample(),), _num_layers_per_chunk=1)
    assert torch.equal(result(sample(3)), eager[0](sample(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.make_graphed_callables(layers(1)[1][0], (sample(),), _num_layers_per_chunk=1)


@pytest.mark.parametrize(
    "flag", [torch.tensor(False), numpy.bool_(False), 0, "", [False], (torch.tensor(False),)]
)
def test_enabled_accepts_all_flag_types_and_a_list(flag, rerun):
    eager, graphed = layers(1)
    (result,) = te.make_graphed_callables(tuple(graphed), ((sample(),),), enabled=flag)
    assert torch.equal(result(sample(3)), eager[0](sample(3)))


def test_a_list_enables_each_module_by_itself(rerun):
    eager, graphed = layers(2)
    samples = tuple((sample(i).requires_grad_(),) for i in range(2))
    result = te.make_graphed_callables(
        tuple(graphed), samples, enabled=[True, False], recipe=Float8CurrentScaling()
    )
    with te.autocast(recipe=Float8CurrentScaling()):
        quantized = eager[0](sample(3))
    assert torch.equal(result[0](sample(3)), quantized)
    assert torch.equal(result[1](sample(3)), eager[1](sample(3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_an_argument_in_another_dtype_is_copied_to_the_captured_one(dtype, rerun):
    eager, graphed = layers(1)
    result = te.make_graphed_callables(graphed[0], (sample().requires_grad_(),))
    x = (4 * sample(3)).to(dtype)
    differentiable = dtype.is_floating_point
    ours, reference = (x.clone().requires_grad_(differentiable) for _ in range(2))
    with pytest.warns(
        UserWarning, match=f"argument 0 is {dtype}, the graph was captured for torch.float32"
    ):
        actual = result(ours)
    expected = eager[0](reference.float())
    assert torch.equal(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(graphed[0].weight.grad, eager[0].weight.grad)
    if differentiable:
        assert ours.grad.dtype == dtype and torch.equal(ours.grad, reference.grad)

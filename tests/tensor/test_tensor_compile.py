"""torch.compile traces quantization whole: the functional core in autograd functions, and quantized parameters."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import NAMES, create_quantizer, values
from transformer_engine.pytorch.primitives.quantize import dequantize
from transformer_engine.pytorch.tensor import COLUMNWISE, ROWWISE, QuantizedTensor, get_storage


class Product(torch.autograd.Function):
    """y = x @ w.T, all operands quantized, the backward's taken from flattened storages."""

    @staticmethod
    def forward(ctx, x, w, quantizer):
        x_storage, w_storage = quantizer.encode(x, True, True), quantizer.encode(w, True, True)
        y = dequantize(x_storage.contract(ROWWISE)) @ dequantize(w_storage.contract(ROWWISE)).t()
        x_tensors, ctx.rebuild_x = x_storage.drop(rowwise=True).flatten()
        w_tensors, ctx.rebuild_w = w_storage.flatten()
        ctx.save_for_backward(*x_tensors, *w_tensors)
        ctx.count, ctx.quantizer = len(x_tensors), quantizer
        return y

    @staticmethod
    def backward(ctx, dy):
        x_storage = ctx.rebuild_x(ctx.saved_tensors[: ctx.count])
        w_storage = ctx.rebuild_w(ctx.saved_tensors[ctx.count :])
        dy_storage = ctx.quantizer.encode(dy, True, True)
        dx = (
            dequantize(dy_storage.contract(ROWWISE))
            @ dequantize(w_storage.contract(COLUMNWISE)).t()
        )
        dw = (
            dequantize(dy_storage.contract(COLUMNWISE))
            @ dequantize(x_storage.contract(COLUMNWISE)).t()
        )
        return dx, dw, None


def product(x, w, quantizer):
    return Product.apply(x, w, quantizer)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


VARIANTS = ("nvfp4_rht", "nvfp4_2d", "mxfp8_2d", "block_2d")  # with the other cases' code paths


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in VARIANTS else ()) for one in NAMES]
)
@pytest.mark.sampled(2)
def test_a_product_and_its_backward_compile_whole(name, device):
    results = []
    for run in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        quantizer = create_quantizer(name, device)
        x = values(device, 32, 64, dtype=torch.float32).requires_grad_()
        w = values(device, 64, 64, dtype=torch.float32).requires_grad_()
        torch.manual_seed(3)
        y = run(x, w, quantizer)
        y.square().sum().backward()
        amax = quantizer.amax.clone() if hasattr(quantizer, "amax") else torch.zeros(1)
        results.append((y.detach(), x.grad, w.grad, amax))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_leading_dimensions_compile(name, device):
    quantizer = create_quantizer(name, device)

    def round_trip(x):
        return quantizer.encode(x, True, False).dequantize()

    x = values(device, 2, 32, 64)
    torch.manual_seed(3)
    expected = round_trip(x)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), expected)


class WithStorage(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, storage):
        tensors, ctx.rebuild = storage.flatten()
        ctx.save_for_backward(x, *tensors)
        return x @ dequantize(storage.contract(ROWWISE)).t()

    @staticmethod
    def backward(ctx, dy):
        x, *tensors = ctx.saved_tensors
        return dy @ dequantize(ctx.rebuild(tensors).contract(ROWWISE)), dy.t() @ x, None


@pytest.mark.parametrize("name", ["current", "state", "mxfp8", "block_2d", "nvfp4_2d"])
def test_a_quantized_parameter_is_read_by_storage_of(name, device):
    weight = torch.nn.Parameter(create_quantizer(name, device)(values(device, 32, 64)))

    def forward(x):
        assert isinstance(weight, QuantizedTensor)
        return WithStorage.apply(x, weight, get_storage(weight))

    x = values(device, 16, 64)
    y = torch.compile(forward, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, forward(x))
    y.sum().backward()
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4_2d"])
def test_a_quantized_parameter_compiles_as_a_plain_one(name, device):
    weight = torch.nn.Parameter(create_quantizer(name, device)(values(device, 32, 64)))

    def forward(x):
        return (x @ weight.t()) + weight.dequantize().sum()

    x = values(device, 16, 64)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, forward(x))
    y.sum().backward()
    assert weight.grad.shape == weight.shape
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(compiled(x), forward(x))

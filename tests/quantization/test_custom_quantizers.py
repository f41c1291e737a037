"""Third-party quantizers: with only the original's methods, with tensors of this package, or with their own class."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.offload.marks import active as offloading
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer

E4M3 = te.DType.kFloat8E4M3


class ByImplementation(Quantizer):
    """quantize_impl alone, through a quantizer from this package."""

    def __init__(self, device):
        super().__init__(rowwise=True, columnwise=True)
        self.device = device

    def quantize_impl(self, tensor):
        inner = te.Float8CurrentScalingQuantizer(
            E4M3, self.device, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage
        )
        return inner(tensor)


class ByUpdate(Quantizer):
    """update_quantized and make_empty alone."""

    def __init__(self, device):
        super().__init__(rowwise=True, columnwise=True)
        self.inner = te.Float8CurrentScalingQuantizer(E4M3, device)

    def make_empty(
        self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False
    ):
        return self.inner.make_empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)

    def update_quantized(self, src, dst, *, noop_flag=None):
        self.inner.update_quantized(src, dst, noop_flag=noop_flag)
        return dst


class Halved(QuantizedTensorStorage):
    """Another library's tensor: values rounded to multiples of a step, by rows and by columns."""

    custom = True

    def __init__(self, values, step, quantizer):
        self.data, self.scale = (values / step).round(), step
        self.data_t, self.scale_t = self.data.t().contiguous(), step
        self._quantizer = quantizer

    def size(self):
        return self.data.size()

    def prepare_for_saving(self):
        tensors = [self.data, self.scale, self.data_t, self.scale_t]
        self.data = self.scale = self.data_t = self.scale_t = None
        return tensors, self

    def restore_from_saved(self, tensors):
        self.data, self.scale, self.data_t, self.scale_t, *rest = tensors
        return rest

    def dequantize(self, *, dtype=None):
        return (self.data * self.scale).to(dtype or torch.float32)


class ByValues(Quantizer):
    """A quantizer whose tensor class, defined here, can dequantize."""

    def __init__(self):
        super().__init__(rowwise=True, columnwise=True)

    def quantize_impl(self, tensor):
        return Halved(tensor, tensor.abs().amax().reshape(1) / 100, self)

    def make_empty(self, shape, **_):
        raise NotImplementedError

    def update_quantized(self, src, dst, *, noop_flag=None):
        raise NotImplementedError


class ByProduct(ByValues):
    """A quantizer that multiplies its tensors itself; kinds: the requested products."""

    kinds: list[str] = []

    def quantize_impl(self, tensor):
        result = super().quantize_impl(tensor)
        result.dequantize = None  # only this quantizer reads the values
        return result

    def qgemm(
        self,
        qx,
        qw,
        m_params,
        out_dtype,
        sx,
        sw,
        bias=None,
        out=None,
        accumulate=False,
        gemm_type=None,
        qresult_x=None,
        qresult_w=None,
    ):
        assert isinstance(qresult_x, Halved) and isinstance(qresult_w, Halved) and bias is None
        assert m_params.out_dtype is out_dtype
        self.kinds.append(gemm_type.name)
        return ((qx @ qw.t()) * (sx * sw)).to(out_dtype)


@dataclasses.dataclass
class Fields(QuantizedTensorStorage):
    """Another library's tensor, with fields and without methods."""

    data: torch.Tensor
    scale: torch.Tensor
    data_t: torch.Tensor
    scale_t: torch.Tensor
    quantizer: Quantizer
    custom: bool = True

    @property
    def _quantizer(self):
        return self.quantizer

    def size(self):
        return self.data.size()


class ByFields(ByProduct):
    """As ByProduct, with the tensor that only has fields."""

    def quantize_impl(self, tensor):
        result = super().quantize_impl(tensor)
        return Fields(result.data, result.scale, result.data_t, result.scale_t, self)

    def qgemm(self, qx, qw, m_params, out_dtype, sx, sw, bias=None, **_):
        return ((qx @ qw.t()) * (sx * sw)).to(out_dtype)


def create_recipe(kind, device):
    return CustomRecipe(
        qfactory=lambda role: kind(device) if kind in (ByImplementation, ByUpdate) else kind()
    )


def step(module, x, recipe, **call):
    """Run one forward and backward pass; return output and gradients."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **call)
    torch.manual_seed(5)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


MODULES = {
    "Linear": (lambda d: te.Linear(64, 32, device=d), {}),
    "LayerNormLinear": (lambda d: te.LayerNormLinear(64, 32, device=d), {}),
    "LayerNormMLP": (lambda d: te.LayerNormMLP(64, 64, device=d), {}),
    "GroupedLinear": (lambda d: te.GroupedLinear(2, 64, 32, device=d), {"m_splits": [16, 16]}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", [ByImplementation, ByUpdate])
def test_methods_of_the_original_are_enough(kind, name, device):
    make, call = MODULES[name]
    module = make(device)
    x = torch.randn(32, 64, device=device)
    got = step(module, x, create_recipe(kind, device), **call)
    local = CustomRecipe(qfactory=lambda role: te.Float8CurrentScalingQuantizer(E4M3, device))
    for actual, reference in zip(got, step(module, x, local, **call), strict=True):
        # On a GPU a norm that makes codes rounds its float32 statistics otherwise than one that makes values.
        tolerance = 1e-6 if device.type == "cuda" else 0.0
        torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODULES)
def test_a_tensor_of_another_library_need_not_say_how_it_is_saved(name, device):
    make, call = MODULES[name]
    module = make(device)
    x = torch.randn(32, 64, device=device)
    by_fields, by_methods = (
        step(module, x, create_recipe(kind, device), **call) for kind in (ByFields, ByProduct)
    )
    for one, other in zip(by_fields, by_methods, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", [ByValues, ByProduct])
def test_tensors_of_another_library_are_multiplied(kind, name, device):
    make, call = MODULES[name]
    module = make(device)
    x = torch.randn(32, 64, device=device)
    ByProduct.kinds.clear()
    got = step(module, x, create_recipe(kind, device), **call)
    for actual, exact in zip(got, step(module, x, None, **call), strict=True):
        # the step is 1/100 of the largest value, so each operand's error is at most 1/200
        assert (actual - exact).norm() <= 0.05 * exact.norm()
        assert not torch.equal(actual, exact) or actual.dim() == 1
    products = {"Linear": 1, "LayerNormLinear": 1}.get(name, 2)
    expected = ["FPROP", "DGRAD", "WGRAD"] * products if kind is ByProduct else []
    assert sorted(ByProduct.kinds) == sorted(expected)


@pytest.mark.parametrize("offloaded", [False, True])
def test_both_ways_to_multiply_agree(offloaded, device, monkeypatch):
    # then the backward pass reads the saved tensors early
    monkeypatch.setattr(offloading, "used", offloaded)
    module = te.Linear(64, 32, device=device)
    x = torch.randn(32, 64, device=device)
    by_values, by_product = (
        step(module, x, create_recipe(kind, device)) for kind in (ByValues, ByProduct)
    )
    for one, other in zip(by_values, by_product, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_general_gemm_takes_tensors_of_custom_quantizers(device):
    x, w = torch.randn(16, 64, device=device), torch.randn(32, 64, device=device)
    for kind in (ByValues, ByProduct):
        qx, qw = kind()(x), kind()(w)
        assert isinstance(qx, Halved)
        y, *_ = general_gemm(qw, qx, out_dtype=torch.float32)
        torch.testing.assert_close(
            y, (qx.data * qx.scale) @ (qw.data * qw.scale).t(), rtol=1e-5, atol=1e-5
        )
    with pytest.raises(TypeError, match="custom quantizers of one family"):
        general_gemm(w, ByProduct()(x), out_dtype=torch.float32)
    with pytest.raises(TypeError, match="custom quantizers of one family"):
        general_gemm(ByProduct()(w), x, out_dtype=torch.float32)


def test_a_quantizer_without_quantize_impl_raises_with_the_remedy(device):
    class Nothing(Quantizer):
        pass

    quantizer = Nothing(rowwise=True, columnwise=False)
    with pytest.raises(TypeError, match=r"Nothing cannot quantize; define quantize_impl\(tensor\)"):
        quantizer(torch.ones(4, 4, device=device))
    with pytest.raises(TypeError, match="define make_empty"):
        quantizer.make_empty((4, 4))
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (True, False)
    assert quantizer != Nothing(rowwise=True, columnwise=False)


def test_quantize_impl_of_our_quantizers_equals_quantize(device):
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, device)
    x = torch.randn(16, 16, device=device)
    assert torch.equal(quantizer.quantize_impl(x).dequantize(), quantizer(x).dequantize())

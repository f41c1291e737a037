"""pytorch.dynamo: quantizers as graph constants, and tensor descriptions."""

from __future__ import annotations

import enum

import pytest
import torch
from torch.torch_version import TorchVersion

import transformer_engine.pytorch as te
from transformer_engine.pytorch import dynamo
from transformer_engine.pytorch.tensor.quantizer import Quantizer

E4M3 = te.DType.kFloat8E4M3
if TorchVersion(torch.__version__) < "2.13":
    pytest.skip("a quantizer is a constant of a graph since torch 2.13", allow_module_level=True)


class Mode(enum.Enum):
    A = 1
    B = 2


QUANTIZERS = {
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, torch.device("cpu")),
    "block": lambda: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "nvfp4": lambda: te.NVFP4Quantizer(),
}


@dynamo.register_value_opaque_quantizer
class Rounding(te.MXFP8Quantizer):
    """A separate class, because a registration lasts until the process ends."""


@torch.library.custom_op("te_test::rounded", mutates_args=())
def quantize_and_dequantize(x: torch.Tensor, quantizer: Rounding) -> torch.Tensor:
    return quantizer(x).dequantize()


@quantize_and_dequantize.register_fake
def _(x, quantizer):
    return torch.empty_like(x)


def test_an_operator_takes_a_quantizer_in_a_graph(emulated):
    torch._dynamo.reset()
    traces = []

    def counting(graph, examples):
        traces.append(graph)
        return graph.forward

    x = torch.randn(64, 64)
    compiled = torch.compile(
        lambda x, q: quantize_and_dequantize(x, q) * 2, fullgraph=True, backend=counting
    )
    fine, coarse = Rounding(E4M3), Rounding(te.DType.kFloat8E5M2)
    for quantizer in (fine, Rounding(E4M3), coarse):
        assert torch.equal(compiled(x, quantizer), quantize_and_dequantize(x, quantizer) * 2)
    assert len(traces) == 2  # an equal quantizer is the same constant
    assert not torch.equal(quantize_and_dequantize(x, fine), quantize_and_dequantize(x, coarse))


def test_a_quantizers_graph_expression_evaluates_to_an_equal_quantizer():
    quantizer = Rounding(E4M3)
    assert dynamo.is_value_opaque_quantizer(quantizer)
    assert not dynamo.is_value_opaque_quantizer(te.MXFP8Quantizer(E4M3))
    text, named = quantizer.__fx_repr__()  # pyright: ignore[reportAttributeAccessIssue]
    made = eval(text, dict(named))
    assert made == quantizer and hash(made) == hash(quantizer) and made is not quantizer


def test_a_registered_class_has_value_equality():
    @dynamo.register_value_opaque_quantizer
    class Own(Quantizer):
        mode: Mode
        limit: float

        def __init__(self, mode: Mode, limit: float) -> None:
            super().__init__(rowwise=True, columnwise=False)
            self.mode, self.limit = mode, limit

    made = Own(Mode.A, 0.5)
    assert made == Own(Mode.A, 0.5) != Own(Mode.B, 0.5) and hash(made) == hash(Own(Mode.A, 0.5))
    text, named = made.__fx_repr__()  # pyright: ignore[reportAttributeAccessIssue]
    assert eval(text, dict(named)) == made
    assert dynamo.is_value_opaque_quantizer(made) and not dynamo.is_value_opaque_quantizer(
        made.mode
    )

    class Held(Quantizer):
        weights: torch.Tensor

    with pytest.raises(TypeError, match=r"Held\.weights"):
        dynamo.register_value_opaque_quantizer(Held)
    with pytest.raises(TypeError, match="subclass of Quantizer"):
        dynamo.register_value_opaque_quantizer(int)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("columnwise", [True, False])
def test_a_spec_describes_a_quantized_tensor(name, columnwise, emulated):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    tensor = quantizer(torch.randn(128, 256))
    spec = dynamo.to_tensor_spec(tensor)
    inner = [getattr(tensor, part) for part in spec.inner_names()]
    allocated = spec.create_inner_tensors()
    assert [(t.shape, t.dtype) for t in allocated] == [(t.shape, t.dtype) for t in inner]
    repeated = spec.assemble(inner)
    assert type(repeated) is type(tensor) and repeated.shape == tensor.shape
    assert torch.equal(repeated.dequantize(), tensor.dequantize())
    assert spec.is_quantized and spec.create_tensor().shape == tensor.shape
    with pytest.raises(ValueError, match="one of each name"):
        spec.assemble(inner[:-1])
    quantizer.set_usage(rowwise=False)
    assert spec.quantizer is not None and spec.quantizer.get_usages()["rowwise"]  # a copy


def test_a_spec_describes_a_plain_tensor():
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    spec = dynamo.to_tensor_spec(x)
    result = spec.create_tensor()
    assert (result.shape, result.dtype, result.requires_grad) == (x.shape, x.dtype, True)
    assert spec.inner_names() == ("data",) and not spec.is_quantized and not spec.create_metadata()
    with pytest.raises(ValueError, match="plain tensor"):
        spec.update_usage(rowwise_usage=True)
    with pytest.raises(TypeError, match="not a tensor"):
        dynamo.to_tensor_spec(3)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("internal", [True, False])
def test_a_quantizer_describes_and_allocates_its_results(name, usages, internal, emulated):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    quantizer.internal = internal
    empty = quantizer.make_empty((2, 64, 256), dtype=torch.bfloat16, device="cpu")
    expected = {
        attribute: (tuple(tensor.shape), tensor.dtype)
        for attribute in empty.TENSORS
        if (tensor := getattr(empty, attribute)) is not None
    }
    specs = quantizer.inner_tensor_specs((2, 64, 256))
    assert specs == expected and list(specs) == list(expected)
    allocated = quantizer.alloc_tensors((2, 64, 256), device="cpu")
    assert {key: (tuple(t.shape), t.dtype) for key, t in allocated.items()} == expected
    metadata = quantizer.create_metadata((2, 64, 256), dtype=torch.bfloat16, requires_grad=True)
    assert (
        metadata["cls"] is type(empty)
        and metadata["is_tensor"] is not internal
        and metadata["requires_grad"]
    )
    storage = quantizer.storage_metadata(torch.bfloat16)
    values = quantizer(torch.randn(2, 64, 256, dtype=torch.bfloat16))
    keywords = {
        keyword: getattr(values, attribute) for attribute, keyword in values.TENSORS.items()
    }
    repeated = storage["cls"](**keywords, **storage["nontensor_kwargs"])
    assert torch.equal(repeated.decode(torch.float32), values.dequantize(dtype=torch.float32))
    spec = dynamo.TensorSpec(
        (2, 64, 256), torch.bfloat16, quantizer, requires_grad=True, device="cpu"
    )
    assert spec.inner_names() == tuple(specs)
    described = spec.create_metadata()
    assert {**described, "nontensor_kwargs": None} == {**metadata, "nontensor_kwargs": None}


def test_equal_settings_have_equal_keys():
    for make in QUANTIZERS.values():
        assert make()._value_key() == make()._value_key() and hash(make()._value_key()) == hash(
            make()._value_key()
        )
    assert (
        QUANTIZERS["mxfp8"]()._value_key() != te.MXFP8Quantizer(te.DType.kFloat8E5M2)._value_key()
    )
    grouped = te.Float8CurrentScalingQuantizer(E4M3, "cpu")
    grouped.amax_reduction_group = object()
    with pytest.raises(
        TypeError, match="amax_reduction_group is an object, which is no plain value"
    ):
        grouped._value_key()


def test_a_spec_selects_directions_by_either_name():
    spec = dynamo.TensorSpec((32, 32), torch.float32, te.MXFP8Quantizer(E4M3), device="cpu")
    spec.update_usage(rowwise=False)
    assert spec.inner_names() == ("_columnwise_data", "_columnwise_scale_inv")
    spec.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert spec.inner_names() == ("_rowwise_data", "_rowwise_scale_inv")


def test_an_outdated_transpose_is_dropped():
    codes, scale = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(1)
    options = {"data_transpose": codes.t().contiguous(), "fake_dtype": torch.bfloat16}
    saved, dropped = (
        te.Float8TensorStorage(codes, scale, E4M3, **options, transpose_invalid=invalid)
        for invalid in (None, True)
    )
    assert (
        saved._transpose is not None and dropped._transpose is None and dropped._transpose_invalid
    )


@torch.library.custom_op("te_test::quantized", mutates_args=())
def quantized(x: torch.Tensor, quantizer: Rounding) -> list[torch.Tensor]:
    result = quantizer(x)
    return [getattr(result, name) for name in dynamo.to_tensor_spec(result).inner_names()]


@quantized.register_fake
def _(x, quantizer):
    return dynamo.TensorSpec(x.shape, x.dtype, quantizer, device=x.device).create_inner_tensors()


def test_a_users_operator_returns_the_inner_tensors_in_one_graph(emulated):
    torch._dynamo.reset()

    def doubled(x, quantizer):
        return [
            2 * part if part.is_floating_point() else part + 1 for part in quantized(x, quantizer)
        ]

    x, quantizer = torch.randn(64, 64), Rounding(E4M3)
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x, quantizer), doubled(x, quantizer), strict=True):
        assert torch.equal(got, expected)

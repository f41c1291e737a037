"""A format and its recipe in one file: described, registered, tested by the shipped formats' suites, removed.

E4M3 (or E5M2) codes, 1 x 64 blocks, power-of-two scales in float32. The code above the tests is complete.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.module import test_grouped_linear, test_linear_layers
from tests.support import layers
from tests.tensor import (
    quantizer_cases,
    test_operands,
    test_quantized_parameters,
    test_quantized_tensor,
    test_quantizers,
    test_row_sharding,
    test_saving,
    test_tensor_compile,
)
from transformer_engine.common.formats import TensorFormat, ceil_div
from transformer_engine.common.recipe import Format, Recipe, recipe_class
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module import LayerNormMLP, Linear
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.primitives.quantize import (
    FORMATS,
    QuantizeSpec,
    cast,
    dequantize,
    formats,
    quantize,
    scale_from_amax,
    tiles,
)
from transformer_engine.pytorch.primitives.quantize.tile_scaled import tile_scaled
from transformer_engine.pytorch.quantization import autocast, emulate, family, get_fp8_te_dtype
from transformer_engine.pytorch.quantization.recipe_state import StatelessRecipeState
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor.block_scaling import BlockScalingQuantizer
from transformer_engine.pytorch.tensor.elements import find_element
from transformer_engine.pytorch.tensor.storage.block_scaled import BlockScaledStorage

# The row of the format table, and the functions that encode and decode it.

TOY = TensorFormat("toy", (1, 64), "float32")


def encode(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """x [R, K] -> codes [R, K], scales float32 [R, ceil(K/64)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    multiplier = scale_from_amax(tiles.tile_amax(cut), spec.element.maximum, power_of_two=True)
    codes = cast(cut * tiles.spread(multiplier), spec.element)
    return tiles.join(codes, (x.shape[0], x.shape[1])), multiplier.reciprocal()


# The container and the quantizer.


class ToyStorage(BlockScaledStorage):
    """Both directions from the values themselves."""

    format = TOY


class ToyTensor(QuantizedTensor, ToyStorage):
    """Presents a standard dtype."""

    STORAGE = ToyStorage

    def _default_quantizer(self) -> Quantizer:
        return ToyQuantizer(self._fp8_dtype, **self.get_usages())

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        tensors = [getattr(self, name) for name in self.TENSORS]
        return make_toy_tensor, (tensors, self._fp8_dtype, self._quantizer, self.dtype, self.shape)


def make_toy_tensor(tensors, element, quantizer, dtype, shape) -> ToyTensor:
    return ToyTensor(
        shape,
        dtype,
        **dict(zip(ToyStorage.TENSORS.values(), tensors, strict=True)),
        fp8_dtype=element,
        quantizer=quantizer,
    )


class ToyQuantizer(BlockScalingQuantizer):
    """Accepts any matrix: blocks at the edges may be partial."""

    TENSOR = ToyTensor
    MULTIPLE = 1

    def __init__(self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def spec(self, rowwise: bool, columnwise: bool) -> QuantizeSpec:
        return QuantizeSpec(TOY, find_element(self.dtype), rowwise, columnwise)

    def constants(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def _get_compatible_recipe(self) -> type[Recipe]:
        return ToyScaling

    def _configuration(self) -> Hashable:
        return self.dtype


# The recipe and its family.


@recipe_class
@dataclass(repr=False)
class ToyScaling(Recipe):
    """One power of two for 64 consecutive elements along the contracted axis."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default=None)


FAMILY = family.Family(
    ToyScaling,
    "toy",
    StatelessRecipeState,
    lambda recipe, mode, tensor, device: ToyQuantizer(get_fp8_te_dtype(recipe, mode == "forward")),
)


@pytest.fixture(autouse=True, scope="module")
def _toy():
    formats.register(tile_scaled(TOY, encode))
    family.register(FAMILY)
    quantizer_cases.CASES["toy"] = lambda device, **usage: ToyQuantizer(DType.kFloat8E4M3, **usage)
    layers.RECIPES["toy"] = ToyScaling()
    test_row_sharding.GRANULARITY["toy"] = 64
    pickled = [ToyQuantizer, ToyTensor, ToyStorage, make_toy_tensor]
    with torch.serialization.safe_globals(pickled), emulate():
        yield
    del quantizer_cases.CASES["toy"], layers.RECIPES["toy"], test_row_sharding.GRANULARITY["toy"]
    family.unregister(FAMILY)
    formats.unregister("toy")


# The suites: every test that takes the name of a format or recipe and runs for "mxfp8" runs for "toy" too.

SUITES = (
    test_quantizers,
    test_quantized_tensor,
    test_quantized_parameters,
    test_operands,
    test_row_sharding,
    test_saving,
    test_tensor_compile,
    test_linear_layers,
    test_grouped_linear,
)
LIKE = "mxfp8"
# Takes nine seconds; the suite's quantized-parameter test always compiles a toy layer, too.
SLOW = "test_compiling_in_one_graph_keeps_the_bits-toy-layernorm_mlp"


def _runs_always(case: Any) -> bool:
    return isinstance(case, type(pytest.param())) and all(
        mark.name != "slow" for mark in case.marks
    )


def _arguments(test) -> list[dict[str, Any]]:
    """Keywords for each test case on LIKE, with the name replaced; empty if the test is not for formats."""
    choices: list[list[dict[str, Any]]] = []
    named = False
    for mark in (mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"):
        keys = (
            [key.strip() for key in mark.args[0].split(",")]
            if isinstance(mark.args[0], str)
            else mark.args[0]
        )
        if keys == ["name"]:
            named = LIKE in mark.args[1]
            choices.append([{"name": "toy"}])
        elif len(keys) == 1:
            choices.append([{keys[0]: value} for value in mark.args[1]])
        elif "name" in keys:
            # Take LIKE's pairs that always run, or the last slow one; other lists do not apply to every
            # format.
            of_like = [
                (case, pair)
                for case in mark.args[1]
                if isinstance(case, type(pytest.param()))
                and (pair := dict(zip(keys, case.values, strict=True)))["name"] == LIKE
            ]
            named = bool(of_like)
            pairs = [pair for case, pair in of_like if _runs_always(case)] or [
                pair for _, pair in of_like[-1:]
            ]
            choices.append([{**pair, "name": "toy"} for pair in pairs])
        else:
            choices.append([dict(zip(keys, value, strict=True)) for value in mark.args[1]])
    if not named:
        return []
    return [
        {k: v for part in parts for k, v in part.items()} for parts in itertools.product(*choices)
    ]


def _case(test, keywords: dict[str, Any]) -> Any:
    name = "-".join((test.__name__, *(str(v) for v in keywords.values())))
    marks = [mark for mark in test.pytestmark if mark.name == "gpu"]
    return pytest.param(
        test, keywords, id=name, marks=[*marks, *[pytest.mark.slow] * (name == SLOW)]
    )


CASES = [
    _case(test, keywords)
    for suite in SUITES
    for name, test in vars(suite).items()
    if name.startswith("test_") and inspect.isfunction(test)
    for keywords in _arguments(test)
]


def test_the_suites_are_found():
    results = {case.values[0].__module__.rpartition(".")[2] for case in CASES}
    assert results == {suite.__name__.rpartition(".")[2] for suite in SUITES}
    assert len(CASES) >= 80 and SLOW in {case.id for case in CASES}


@pytest.mark.parametrize(("test", "keywords"), CASES)
def test_the_toy_format_passes_the_format_suites(test, keywords, device):
    torch._dynamo.reset()
    parameters = inspect.signature(test).parameters
    test(**keywords, **({"device": device} if "device" in parameters else {}))


# Properties that the suites do not check for every format.


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (64, 64), (65, 65), (7, 200), (130, 1)])
def test_scales_are_powers_of_two_that_use_the_range(shape, device):
    x = torch.randn(shape, device=device)
    storage = ToyQuantizer(DType.kFloat8E4M3).encode(x, True, True)
    for axis, matrix in ((ROWWISE, x), (COLUMNWISE, x.t())):
        operand = storage.contract(axis)
        assert operand.scale is not None
        assert operand.scale.shape == (matrix.shape[0], ceil_div(matrix.shape[1], 64))
        mantissas, _ = torch.frexp(operand.scale)
        assert bool((mantissas == 0.5).all())
        for start in range(0, matrix.shape[1], 64):
            block = matrix[:, start : start + 64].double()
            scale = operand.scale[:, start // 64, None].double()
            largest = block.abs().amax(1, keepdim=True) / scale
            assert bool((largest <= 448).all()) and bool((largest > 224).all())
            expected = (block / scale).float().to(torch.float8_e4m3fn).double() * scale
            got = dequantize(operand._replace(dtype=torch.float32))[:, start : start + 64].double()
            assert torch.equal(got, expected)


def _values(quantizer: Quantizer, tensor: Tensor, axis: str) -> Tensor:
    operand = quantizer.encode(tensor.detach(), axis == ROWWISE, axis == COLUMNWISE).contract(axis)
    return dequantize(operand._replace(dtype=torch.float32)).double()


@pytest.mark.parametrize("rows", [1, 64, 97])
def test_a_linear_layer_multiplies_the_rounded_values(rows, device):
    layer = Linear(96, 80, device=device)
    x = torch.randn(rows, 96, device=device, requires_grad=True)
    dy = torch.randn(rows, 80, device=device)
    with autocast(recipe=ToyScaling()):
        y = layer(x)
    y.backward(dy)
    forward, backward = ToyQuantizer(DType.kFloat8E4M3), ToyQuantizer(DType.kFloat8E5M2)
    assert layer.bias is not None and x.grad is not None
    expected = (
        _values(forward, x, ROWWISE) @ _values(forward, layer.weight, ROWWISE).t()
        + layer.bias.double(),
        _values(backward, dy, ROWWISE) @ _values(forward, layer.weight, COLUMNWISE).t(),
        _values(backward, dy, COLUMNWISE) @ _values(forward, x, COLUMNWISE).t(),
    )
    for got, exact in zip((y, x.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(
            got.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max())
        )


def test_a_checkpoint_carries_the_recipe(device):
    layer, other = (LayerNormMLP(64, 96, device=device) for _ in range(2))
    x = torch.randn(64, 64, device=device)
    recipe = ToyScaling(fp8_format=Format.E4M3)
    with autocast(recipe=recipe):
        y = layer(x)
    other.load_state_dict(layer.state_dict())
    assert other.fp8_meta["recipe"] == recipe
    with autocast(recipe=recipe):
        assert torch.equal(other(x), y)


def test_a_format_without_kernels_is_computed_by_the_reference(device):
    assert FORMATS["toy"].plan is None
    x = torch.randn(64, 64, device=device)
    tensor = quantize(x, ToyQuantizer(DType.kFloat8E4M3).spec(True, False))
    assert tensor.codes is not None and tensor.codes.shape == (64, 64)


def test_an_unregistered_format_is_unknown():
    formats.unregister("toy")
    try:
        with pytest.raises(ValueError, match="no rule to dequantize format 'toy'"):
            storage = ToyStorage(
                torch.zeros(4, 64, dtype=torch.uint8),
                torch.ones(4, 1),
                None,
                None,
                DType.kFloat8E4M3,
            )
            storage.decode(torch.float32)
    finally:
        formats.register(tile_scaled(TOY, encode))

"""Quantizer.operands: product operands with the codes and scales from `encode`, and kernel-written codes."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import DETERMINISTIC, State, create_quantizer
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functions.linear_operands import to_operand
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE, Operand
from transformer_engine.pytorch.primitives.quantize import quantize_as
from transformer_engine.pytorch.tensor import (
    Float8Quantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.tensor.quantizer import Calibrating, TransposedValues


def matrix(device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(256, 128, generator=generator).to(device, torch.bfloat16)


def assert_equal(actual: Operand, expected: Operand) -> None:
    assert actual.format == expected.format and actual.dtype == expected.dtype
    for a, b in (
        (actual.codes, expected.codes),
        (actual.scale, expected.scale),
        (actual.amax, expected.amax),
    ):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            # A copy with the usual strides: contiguous() keeps the strides of a transposed column.
            first, second = (x.clone(memory_format=torch.contiguous_format) for x in (a, b))
            assert torch.equal(
                first.flatten().view(torch.uint8), second.flatten().view(torch.uint8)
            )


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("directions", [(True, True), (True, False), (False, True)])
def test_operands_equal_those_of_a_storage(device, name, directions):
    device = torch.device(device)
    x = matrix(device)
    rowwise, columnwise = create_quantizer(name, device).operands(x, *directions)
    storage = create_quantizer(name, device).encode(x, *directions)
    if directions[0]:
        assert rowwise is not None
        assert_equal(rowwise, storage.contract(ROWWISE))
    if directions[1]:
        assert columnwise is not None
        assert_equal(to_operand(columnwise), storage.contract(COLUMNWISE))


def test_delayed_scaling_records_the_maximum_in_its_slot(device):
    state = State(torch.device(device))
    quantizer = Float8Quantizer.from_state(state, 1, DType.kFloat8E4M3)
    x = matrix(device)
    quantizer.operands(x, True, True)
    expected = x.abs().max().float()
    assert state.amax_history[0].tolist() == [0.0, float(expected), 0.0]


def test_a_state_whose_tensors_are_replaced_is_read_again(device):
    state = State(torch.device(device))
    quantizer = Float8Quantizer.from_state(state, 1, DType.kFloat8E4M3)
    x = matrix(device)
    before = quantizer.operands(x, True, False).rowwise
    state.scale = torch.full((3,), 16.0, device=device)
    state.amax_history = torch.zeros(4, 3, device=device)
    after = quantizer.operands(x, True, False).rowwise
    assert (
        before is not None
        and after is not None
        and before.scale is not None
        and after.scale is not None
    )
    assert float(before.scale) == 0.5 and float(after.scale) == 0.0625
    assert float(state.amax_history[0, 1]) > 0


def test_unquantized_columns_are_the_values_themselves(device):
    x = matrix(device)
    for quantizer in (
        create_quantizer("identity", torch.device(device)),
        Calibrating(create_quantizer("state", x.device)),
    ):
        columnwise = quantizer.operands(x, True, True).columnwise
        assert isinstance(columnwise, TransposedValues) and columnwise.values is x


@pytest.mark.parametrize("name", ["delayed", "state", "current", "block_1d", "block_2d"])
def test_a_kernel_that_follows_the_request_makes_the_same_operands(device, name):
    x = matrix(device)
    requested = create_quantizer(name, x.device)
    cast = requested.cast(True, True)
    assert cast is not None
    result = quantize_as(x, cast)
    expected = create_quantizer(name, x.device).operands(x, True, True)
    for actual, other in zip(requested.adopt(result, x.dtype), expected, strict=True):
        assert isinstance(actual, Operand) and isinstance(other, Operand)
        assert_equal(actual, other)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "identity"])
def test_other_quantizers_launch_no_kernel(device, name):
    quantizer = create_quantizer(name, torch.device(device))
    assert quantizer.cast(True, True) is None
    with pytest.raises(TypeError, match="cannot run inside another kernel"):
        quantizer.adopt(None, torch.bfloat16)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("signs", [None, False, True])
def test_a_storage_knows_the_transform_of_its_columns(device, signs):
    transforms = signs is not None
    quantizer = NVFP4Quantizer(
        with_rht=transforms, with_post_rht_amax=transforms, with_random_sign_mask=signs is not False
    )
    plain_rows = MXFP8Quantizer(torch.float8_e4m3fn)
    x = torch.randn(32, 64, device=device)
    for either in (quantizer, HybridQuantizer(plain_rows, quantizer)):
        assert either.column_signs is signs
        assert either.encode(x, True, True).column_signs is signs
    assert plain_rows.column_signs is None and plain_rows.encode(x, True, True).column_signs is None

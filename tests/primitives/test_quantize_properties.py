"""Properties that every quantization has for random inputs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.quantized import raw
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    FLOAT32_MAX,
    MXFP8,
    NVFP4,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import (
    QuantizeSpec,
    absolute_maximum,
    dequantize,
    e8m0_to_float,
    quantize,
    scale_from_amax,
)

SPECS = {
    "float8-e4m3": QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    "float8-e5m2": QuantizeSpec(FLOAT8, E5M2, columnwise=True),
    "float8-power-of-two": QuantizeSpec(FLOAT8, E4M3, columnwise=True, power_of_two=True),
    "block1d": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True, power_of_two=True),
    "block1d-float32-scale": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True),
    "block2d": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True, power_of_two=True),
    "mxfp8-e4m3": QuantizeSpec(MXFP8, E4M3, columnwise=True),
    "mxfp8-e5m2": QuantizeSpec(MXFP8, E5M2, columnwise=True),
    "mxfp8-2d": QuantizeSpec(MXFP8, E4M3, columnwise=True, two_dimensional=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True),
    "nvfp4-2d": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
}
# If the scales are powers of two, quantizing the dequantized values again does not change them.
EXACT_SCALES = ("float8-power-of-two", "block1d", "block2d", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp8-2d")
# Largest relative distance between a number in the normal range and the nearest code's value.
HALF_GAP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}

every_spec = pytest.mark.parametrize("name", SPECS)
few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
even_sizes = st.sampled_from([2, 14, 16, 18, 30, 32, 34, 126, 128, 130])


@st.composite
def matrices(draw, sizes=even_sizes):
    """Normal numbers times powers of two from 2^-30 to 2^30, one power per row, one element an outlier."""
    rows, depth = draw(sizes), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.integers(0, 30))
    x = torch.randn(rows, depth, generator=generator)
    x = x * torch.exp2(
        torch.randint(-spread, spread + 1, (rows, 1), generator=generator).to(torch.float32)
    )
    x[draw(st.integers(0, rows - 1)), draw(st.integers(0, depth - 1))] *= draw(
        st.sampled_from([0.0, 1.0, 1e4])
    )
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def rowwise_operand(q, spec: QuantizeSpec) -> Operand:
    return Operand(q.codes, q.scale, spec.format, q.amax)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    assert a is not None and b is not None
    return a.shape == b.shape and torch.equal(raw(a), raw(b))


@every_spec
@few
@given(x=matrices())
def test_columnwise_is_rowwise_of_the_transpose(name, device, x):
    spec = SPECS[name]
    x = x.to(device)
    columns, rows = quantize(x, spec), quantize(x.t().contiguous(), spec)
    assert same_bits(columns.codes_t, rows.codes)
    assert same_bits(columns.scale_t, rows.scale)


@every_spec
@few
@given(x=matrices())
def test_one_direction_alone_equals_both_directions_together(name, device, x):
    both = SPECS[name]
    one = functools.partial(dataclasses.replace, both)
    x = x.to(device)
    expected = quantize(x, both)
    rows = quantize(x, one(rowwise=True, columnwise=False))
    columns = quantize(x, one(rowwise=False, columnwise=True))
    assert same_bits(rows.codes, expected.codes) and same_bits(rows.scale, expected.scale)
    assert same_bits(columns.codes_t, expected.codes_t) and same_bits(
        columns.scale_t, expected.scale_t
    )
    assert rows.codes_t is None and rows.scale_t is None
    assert columns.codes is None and columns.scale is None


@pytest.mark.parametrize("name", EXACT_SCALES)
@few
@given(x=matrices())
def test_dequantized_values_quantize_to_themselves(name, device, x):
    spec = SPECS[name]
    once = dequantize(rowwise_operand(quantize(x.to(device), spec), spec))
    twice = dequantize(rowwise_operand(quantize(once, spec), spec))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("name", ["float8-e4m3", "float8-e5m2"])
@few
@given(x=matrices())
def test_quantizing_dequantized_values_repeats_the_codes(name, device, x):
    spec = SPECS[name]
    first = quantize(x.to(device), spec)
    repeated = quantize(dequantize(rowwise_operand(first, spec)), spec)
    assert same_bits(first.codes, repeated.codes)


@every_spec
@few
@given(x=matrices())
def test_quantization_is_monotonic_within_a_shared_scale(name, device, x):
    spec = SPECS[name]
    width = 16 if spec.tile is None else spec.tile[1]
    row = x.to(device).flatten()[:width].sort().values[None, : min(width, x.numel()) // 2 * 2]
    values = dequantize(
        rowwise_operand(quantize(row, QuantizeSpec(spec.format, spec.element)), spec)
    )
    assert (values.diff(dim=1) >= 0).all()


@every_spec
@few
@given(x=matrices())
def test_negated_values_have_codes_with_flipped_signs(name, device, x):
    spec = SPECS[name]
    x = x.to(device)
    plus, minus = quantize(x, spec), quantize(-x, spec)
    assert same_bits(plus.scale, minus.scale)
    assert torch.equal(
        dequantize(rowwise_operand(plus, spec)), -dequantize(rowwise_operand(minus, spec))
    )


@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if s.element is not E2M1])
@few
@given(x=matrices())
def test_rounding_error_is_at_most_half_a_gap(name, device, x):
    """Of the value itself, or in the subnormal range 2^-9 (E4M3) and 2^-16 (E5M2) of a unit of scale."""
    spec = SPECS[name]
    x = x.to(device)
    q = quantize(x, spec)
    assert q.codes is not None
    ones = torch.ones_like(x, dtype=torch.float32).to(q.codes.dtype)
    unit = dequantize(rowwise_operand(q._replace(codes=ones), spec))
    half_gap = HALF_GAP[spec.element.name]
    least = 2.0 ** (1 - spec.element.bias) * half_gap
    bound = torch.maximum(x.float().abs() * half_gap, unit * least) * (1 + 1e-6)
    assert ((dequantize(rowwise_operand(q, spec)) - x.float()).abs() <= bound).all()


@few
@given(x=matrices())
def test_nvfp4_error_is_at_most_a_sixth_of_the_maximum_and_half_a_scale_step(device, x):
    """Half the widest gap is 1 of 6; rounding the block scale to E4M3 adds at most 2^-4 times the maximum."""
    spec = SPECS["nvfp4"]
    x = x.to(device)
    values = dequantize(rowwise_operand(quantize(x, spec), spec))
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 16))
    block_amax = (
        padded.view(x.shape[0], -1, 16).abs().amax(-1).repeat_interleave(16, 1)[:, : x.shape[1]]
    )
    # Below 2^-6 of a unit the block scale itself is subnormal and loses relative precision.
    floor = 6 * 2.0**-6 * absolute_maximum(x) / (6 * 448)
    bound = torch.maximum(block_amax, floor) * (1 / 6 * (1 + 2**-4) + 2**-4)
    assert ((values - x.float()).abs() <= bound).all()


@few
@given(x=matrices())
def test_mxfp8_exponent_is_the_least_that_does_not_saturate(device, x):
    spec = SPECS["mxfp8-e4m3"]
    q = quantize(x.to(device), spec)
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32))
    amax = padded.view(x.shape[0], -1, 32).abs().amax(-1)
    assert q.scale is not None
    scale = e8m0_to_float(q.scale).double().cpu()
    assert (amax <= 448 * scale * (1 + 2**-23)).all()
    assert ((amax >= 224 * scale * (1 - 2**-23)) | (amax == 0)).all()


positive = st.floats(min_value=0, max_value=FLOAT32_MAX, width=32)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(amax=positive, maximum=st.sampled_from([448.0, 57344.0]))
def test_the_scale_maps_amax_to_the_formats_maximum(amax, maximum):
    scale = scale_from_amax(torch.tensor([amax]), maximum).double().item()
    if amax == 0:
        assert scale == 1
    elif maximum / amax > FLOAT32_MAX:
        assert scale == FLOAT32_MAX
    else:
        assert amax * scale == pytest.approx(maximum, rel=2**-24)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(amax=positive)
def test_a_power_of_two_scale_is_the_largest_not_above_the_exact_scale(amax):
    full = scale_from_amax(torch.tensor([amax]), 448.0)
    floored = scale_from_amax(torch.tensor([amax]), 448.0, power_of_two=True)
    assert torch.frexp(floored).mantissa.item() == 0.5
    assert floored.item() <= full.item() < 2 * floored.item()


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_scale_for_an_unusable_amax_is_one(amax, power_of_two, device):
    amax_tensor = torch.tensor([amax], device=device)
    assert scale_from_amax(amax_tensor, 448.0, power_of_two=power_of_two).item() == 1.0


def test_an_overflowing_scale_becomes_value_for_inf(device):
    amax = torch.tensor([1e-44], device=device)
    assert scale_from_amax(amax, 448.0).item() == FLOAT32_MAX
    assert scale_from_amax(amax, 448.0, value_for_inf=65504.0).item() == 65504.0
    assert scale_from_amax(amax, 448.0, value_for_inf=65504.0, power_of_two=True).item() == 32768.0

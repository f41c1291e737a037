"""Kernels that quantize their result are bitwise equal to the separate steps."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.primitives.by_kernels import Kernels, activation_fuses
from tests.support.kernels import DEVICE, INTERPRETED, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, ROUNDED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import BLOCK_1D, E4M3, E5M2, FLOAT8, MXFP8
from transformer_engine.pytorch.primitives import activation, norm
from transformer_engine.pytorch.primitives import column_sums as sums_module
from transformer_engine.pytorch.primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
    OutputCast,
    activation_backward,
    activation_backward_and_output,
    activation_forward,
)
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import (
    Cast,
    QuantizeSpec,
    dequantize,
    fused_codes,
    quantize,
)

norms = Kernels(norm, "norm")
activations = Kernels(activation, "activation")
sums_of = Kernels(sums_module, "column_sums")

PARAMS = ActivationParams(limit=2.0, alpha=1.5, offset=0.5)
DELAYED = pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "current"])
COLUMNWISE = pytest.mark.parametrize("columnwise", [False, True], ids=["row", "both"])
SMALL_NORMS = [(1, 1), (5, 33), (9, 64), (3, 2048), (4, 5000), (2, 9000), (2, 17000)]
LARGE_NORMS = [(513, 4096), (64, 8192), (300, 1024), (40, 5120), (33, 12288), (16, 32768)]
NORMS = parametrize_sizes("shape", SMALL_NORMS, LARGE_NORMS, ids=str)
SMALL = [(1, 1), (5, 33), (64, 64), (7, 200), (130, 6)]
LARGE = [(4096, 2048), (513, 14336), (2049, 4097)]
FEW = ("gelu", "swiglu", "clamped_swiglu")
SHAPES = parametrize_sizes("shape", SMALL, LARGE, ids=str)


@pytest.fixture(autouse=True)
def _interpreted_kernels_count_as_the_quantization_s(monkeypatch):
    """In the interpreter `quantize` is the reference, whose bits the fused kernels must have too."""
    if INTERPRETED:
        monkeypatch.setattr(
            fused_codes, "fuses", lambda shape, dtype, device, spec, given: 0 not in shape
        )


def _spec(columnwise, element=E4M3):
    return QuantizeSpec(FLOAT8, element, True, columnwise)


class Scaling(NamedTuple):
    scale: torch.Tensor | None
    record: torch.Tensor | None


def _scaling(delayed):
    if not delayed:
        return Scaling(scale=None, record=None)
    return Scaling(torch.tensor([37.3], device=DEVICE), torch.tensor([0.5], device=DEVICE))


def _same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            view = torch.uint8 if a.element_size() == 1 else a.dtype
            assert torch.equal(a.view(view), b.view(view))


@runs_kernels
@NORMS
@DELAYED
@COLUMNWISE
@pytest.mark.parametrize("kind", ["layernorm", "layernorm_without_beta", "rmsnorm"])
def test_fused_norm_codes_equal_separate_quantization(shape, delayed, columnwise, kind):
    x = (torch.randn(shape, device=DEVICE) * 2.0 + 0.3).bfloat16()
    weight, bias = (torch.randn(shape[1], device=DEVICE).bfloat16() for _ in range(2))
    bias = None if kind == "layernorm_without_beta" else bias
    how, spec = (1e-5, True), _spec(columnwise)
    first, second = _scaling(delayed), _scaling(delayed)
    if kind == "rmsnorm":
        y, *statistics = norms.rmsnorm_forward(x, weight, *how)
        result = norms.rmsnorm_forward(x, weight, *how, Cast(spec, *second))
    else:
        y, *statistics = norms.layernorm_forward(x, weight, bias, *how)
        result = norms.layernorm_forward(x, weight, bias, *how, Cast(spec, *second))
    _same(result[0], quantize(y, spec, multiplier=first.scale, record=first.record))
    _same(result[1:], statistics)
    assert result[0].amax is not None and (not delayed or result[0].amax is second.record)


@runs_kernels
@SHAPES
@DELAYED
@COLUMNWISE
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_fused_activation_and_gradient_codes_equal_separate_quantization(
    shape, delayed, columnwise, name
):
    if name not in FEW and not (delayed and shape == (64, 64)):
        pytest.skip("a few activations are enough for this shape")
    x = (
        torch.randn(
            shape[0], shape[1] * (2 if ACTIVATIONS[name].gated else 1), device=DEVICE
        ).bfloat16()
        * 2
    )
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    spec, first, second = _spec(columnwise), _scaling(delayed), _scaling(delayed)
    y = activations.activation_forward(name, x, PARAMS)
    result = activations.activation_forward(name, x, PARAMS, Cast(spec, *second))
    _same(result, quantize(y, spec, multiplier=first.scale, record=first.record))
    spec = _spec(columnwise, E5M2)
    dx = activations.activation_backward(name, dy, x, PARAMS)
    expected = quantize(dx, spec, multiplier=first.scale, record=first.record)
    cast = Cast(spec, *second)
    result, sums = activations.activation_backward(name, dy, x, PARAMS, cast, torch.float32)
    _same(result, expected)
    torch.testing.assert_close(sums, dx.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    if shape == (64, 64):
        without, none = activations.activation_backward(name, dy, x, PARAMS, cast)
        assert none is None
        _same(without, expected)


@runs_kernels
@SHAPES
@DELAYED
@COLUMNWISE
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_a_gradient_is_computed_together_with_the_outputs_columns(shape, delayed, columnwise, name):
    """dx and its maximum with current scaling, dx codes with delayed scaling; the output's codes always."""
    if name not in FEW and not (delayed and columnwise and shape == (64, 64)):
        pytest.skip("a few activations are enough for this shape")
    x = (
        torch.randn(
            shape[0], shape[1] * (2 if ACTIVATIONS[name].gated else 1), device=DEVICE
        ).bfloat16()
        * 2
    )
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    columns, first, second = (
        QuantizeSpec(FLOAT8, E4M3, rowwise=False, columnwise=True),
        _scaling(delayed),
        _scaling(delayed),
    )
    y = activations.activation_forward(name, x, PARAMS)
    amax = None if delayed else y.float().abs().amax().reshape(1)
    dx = activations.activation_backward(name, dy, x, PARAMS)
    cast = Cast(_spec(columnwise, E5M2), *second) if delayed else None
    output = OutputCast(columns, first.scale, amax)
    result, codes = activations.activation_backward_and_output(name, dy, x, PARAMS, cast, output)
    _same(codes[:4], quantize(y, columns, multiplier=first.scale, amax=amax)[:4])
    if delayed:
        _same(
            result,
            quantize(dx, _spec(columnwise, E5M2), multiplier=first.scale, record=first.record),
        )
    else:
        assert torch.equal(result.values, dx) and torch.equal(
            result.amax, dx.float().abs().amax().reshape(1)
        )


@runs_kernels
@DELAYED
@pytest.mark.parametrize("shape", [(5, 128), (70, 256), (130, 384)], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_an_encoded_input_gives_the_same_gradient_and_columns_as_its_values(shape, delayed, name):
    x = (
        torch.randn(
            shape[0], shape[1] * (2 if ACTIVATIONS[name].gated else 1), device=DEVICE
        ).bfloat16()
        * 2
    )
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    coded = quantize(x, QuantizeSpec(BLOCK_1D, E4M3))
    assert coded.codes is not None and coded.scale is not None
    column_major = coded.scale.t().contiguous().t()  # as the cast kernel writes them
    encoded = Operand(coded.codes, column_major, BLOCK_1D, None, torch.bfloat16)
    output = OutputCast(
        QuantizeSpec(FLOAT8, E4M3, rowwise=False, columnwise=True), _scaling(True).scale, None
    )
    casts = [Cast(_spec(True, E5M2), *_scaling(True)) if delayed else None for _ in range(2)]
    values = dequantize(encoded)
    assert not torch.equal(values, x)
    expected = activations.activation_backward_and_output(
        name, dy, values, PARAMS, casts[0], output
    )
    actual = activations.activation_backward_and_output(name, dy, encoded, PARAMS, casts[1], output)
    _same(actual[0], expected[0])
    _same(actual[1], expected[1])


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_the_outputs_columns_equal_separate_steps_on_every_device(name, device):
    x = torch.randn(160, 256, device=device).bfloat16()
    columns, scale = (
        QuantizeSpec(FLOAT8, E4M3, rowwise=False, columnwise=True),
        torch.tensor([8.0], device=device),
    )
    y = activation_forward(name, x, PARAMS)
    for output in (
        OutputCast(columns, scale, None),
        OutputCast(columns, None, y.float().abs().amax().reshape(1)),
    ):
        expected = quantize(y, columns, multiplier=output.multiplier, amax=output.amax)
        dx, codes = activation_backward_and_output(name, y, x, PARAMS, None, output)
        _same(codes[:4], expected[:4])
        assert torch.equal(dx.values, activation_backward(name, y, x, PARAMS))
        assert torch.equal(dx.amax, dx.values.float().abs().amax().reshape(1))


@runs_kernels
@DTYPES
@SHAPES
def test_a_cast_with_column_sums_has_the_same_codes_as_the_cast(dtype, shape):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    spec, first, second = _spec(True), _scaling(True), _scaling(True)
    result, sums = sums_of.column_sums(x, dtype, Cast(spec, *second))
    _same(result, quantize(x, spec, multiplier=first.scale, record=first.record))
    assert sums.dtype == dtype
    tolerance = ROUNDED[dtype]
    torch.testing.assert_close(sums.float(), x.double().sum(0).float(), rtol=tolerance, atol=1e-4)


@runs_kernels
def test_strided_inputs_have_the_same_codes_as_their_copies():
    wide = torch.randn(70, 300, device=DEVICE).bfloat16()
    for x in (wide[:, :128], wide[:, 1:129], wide.t()[:128].t(), wide[::2, :64]):
        for name in ("gelu", "swiglu"):
            actual = activations.activation_forward(
                name, x, PARAMS, Cast(_spec(True), *_scaling(True))
            )
            copy = x.clone(memory_format=torch.contiguous_format)
            repeated = Cast(_spec(True), *_scaling(True))
            _same(actual, activations.activation_forward(name, copy, PARAMS, repeated))
        weight = torch.ones(x.shape[1], device=DEVICE)
        first, second = (Cast(_spec(True), *_scaling(True)) for _ in range(2))
        actual, _ = norms.rmsnorm_forward(x, weight, 1e-5, False, first)
        expected, _ = norms.rmsnorm_forward(x.contiguous(), weight, 1e-5, False, second)
        _same(actual, expected)


@runs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_recorded_maxima_equal_separate_steps_for_nonfinite_numbers(bad):
    x = torch.zeros(6, 48, device=DEVICE, dtype=torch.bfloat16)
    x[3, 7] = bad
    first, second = _scaling(True), _scaling(True)
    activations.activation_forward("relu", x, PARAMS, Cast(_spec(True), *second))
    quantize(torch.relu(x), _spec(True), multiplier=first.scale, record=first.record)
    assert first.record is not None and second.record is not None
    torch.testing.assert_close(second.record, first.record, rtol=0, atol=0, equal_nan=True)


FUNCTIONS = pytest.mark.parametrize(
    "spec", [_spec(True), QuantizeSpec(BLOCK_1D, E4M3)], ids=["float8", "block"]
)


@FUNCTIONS
@DELAYED
def test_the_public_functions_equal_the_two_steps_on_every_device(spec, delayed, device):
    x = torch.randn(160, 256, device=device).bfloat16()
    weight = torch.ones(256, device=device).bfloat16()
    scale = torch.tensor([8.0], device=device) if delayed and spec.format is FLOAT8 else None
    cast = Cast(spec, scale)
    y, mean, rstdev = norm.layernorm_forward(x, weight, weight, 1e-5, False)
    result = norm.layernorm_forward(x, weight, weight, 1e-5, False, cast)
    _same(result[0], quantize(y, spec, multiplier=scale))
    _same(result[1:], (mean, rstdev))
    y, rstdev = norm.rmsnorm_forward(x, weight, 1e-5, False)
    result = norm.rmsnorm_forward(x, weight, 1e-5, False, cast)
    _same((*result[0], result[1]), (*quantize(y, spec, multiplier=scale), rstdev))
    y = activation_forward("swiglu", x, PARAMS)
    _same(activation_forward("swiglu", x, PARAMS, cast), quantize(y, spec, multiplier=scale))
    dx = activation_backward("swiglu", y, x, PARAMS)
    result, sums = activation_backward("swiglu", y, x, PARAMS, cast, torch.float32)
    _same(result, quantize(dx, spec, multiplier=scale))
    torch.testing.assert_close(sums, dx.float().sum(0), rtol=1e-4, atol=1e-4)
    result, sums = column_sums(x, torch.float32, cast)
    _same(result, quantize(x, spec, multiplier=scale))
    torch.testing.assert_close(sums, x.float().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_forced_reference_quantization_is_not_fused_away():
    x = torch.randn(64, 64, device="cuda").bfloat16()
    spec = _spec(False)
    assert activation_fuses("gelu", x, spec, backward=False)
    with use_backend(quantize="reference"):
        assert not activation_fuses("gelu", x, spec, backward=False)


def test_other_formats_and_empty_matrices_use_separate_steps(device):
    if INTERPRETED:
        pytest.skip("the interpreter takes every matrix")
    x = torch.randn(64, 64, device=device)
    assert not activation_fuses("gelu", x, QuantizeSpec(MXFP8, E4M3), backward=False)
    assert not activation_fuses("gelu", x[:0], _spec(True), backward=False)
    assert not activation_fuses(
        "gelu", x, QuantizeSpec(FLOAT8, E4M3, rowwise=False, columnwise=True), backward=False
    )

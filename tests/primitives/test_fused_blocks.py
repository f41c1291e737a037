"""Kernels that quantize their result in blocks of 128 equal the separate steps bitwise; column sums."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels, activation_fuses, norm_fuses
from tests.support.kernels import DEVICE, INTERPRETED, parametrize_sizes, runs_kernels
from tests.support.tolerances import ROUNDED
from transformer_engine.common.dispatch import observing, use_backend
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, E5M2, FLOAT8, MXFP8
from transformer_engine.pytorch.primitives import activation, norm
from transformer_engine.pytorch.primitives import column_sums as sums_module
from transformer_engine.pytorch.primitives.activation import ACTIVATIONS, ActivationParams
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.quantize import Cast, QuantizeSpec, fused_codes, quantize

norms = Kernels(norm, "norm")
activations = Kernels(activation, "activation")
sums_of = Kernels(sums_module, "column_sums")

PARAMS = ActivationParams(limit=2.0, alpha=1.5, offset=0.5)
SMALL = [(1, 1), (5, 33), (128, 128), (257, 130), (130, 384)]
LARGE = [(4096, 2048), (2049, 4097)]
SHAPES = parametrize_sizes("shape", SMALL, LARGE, ids=str)
FORMATS = pytest.mark.parametrize("tiles", [BLOCK_1D, BLOCK_2D], ids=["1d", "2d"])
DIRECTIONS = pytest.mark.parametrize(
    ("tiles", "columnwise"),
    [(BLOCK_1D, True), (BLOCK_1D, False), (BLOCK_2D, True)],
    ids=["1d", "rows", "2d"],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
ALL_SHAPES = ("gelu", "swiglu")
ROWS = QuantizeSpec(BLOCK_1D, E4M3, rowwise=True, columnwise=False)


@pytest.fixture(autouse=True)
def _interpreted_kernels_count_as_the_quantization_s(monkeypatch):
    """In the interpreter `quantize` is the reference, whose bits the fused kernels must have too."""
    if INTERPRETED:
        monkeypatch.setattr(
            fused_codes, "fuses", lambda shape, dtype, device, spec, given: 0 not in shape
        )


def _same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            # the reference lays its scales out otherwise
            assert INTERPRETED or a.stride() == b.stride()
            view = torch.uint8 if a.element_size() == 1 else a.dtype
            assert torch.equal(a.view(view), b.view(view))


def _close_sums(sums, x):
    tolerance = ROUNDED[sums.dtype]
    torch.testing.assert_close(sums.float(), x.double().sum(0).float(), rtol=tolerance, atol=1e-3)


@runs_kernels
@SHAPES
@DIRECTIONS
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_fused_activation_and_gradient_codes_equal_separate_quantization(
    shape, tiles, columnwise, name
):
    if (
        name not in ALL_SHAPES and (shape != (128, 128) or tiles is BLOCK_2D or not columnwise)
    ) or (tiles is BLOCK_2D and name != "swiglu"):
        pytest.skip("tiles are computed the same way for every fused operation")
    x = (
        torch.randn(
            shape[0], shape[1] * (2 if ACTIVATIONS[name].gated else 1), device=DEVICE
        ).bfloat16()
        * 2
    )
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    spec = QuantizeSpec(tiles, E4M3, True, columnwise, power_of_two=True)
    result = activations.activation_forward(name, x, PARAMS, Cast(spec))
    _same(result, quantize(activations.activation_forward(name, x, PARAMS), spec))
    spec = QuantizeSpec(tiles, E5M2, True, columnwise, epsilon=1e-3)
    dx = activations.activation_backward(name, dy, x, PARAMS)
    expected = quantize(dx, spec)
    result, sums = activations.activation_backward(name, dy, x, PARAMS, Cast(spec), torch.bfloat16)
    _same(result, expected)
    _close_sums(sums, dx)
    if shape == (128, 128):
        without, none = activations.activation_backward(name, dy, x, PARAMS, Cast(spec))
        assert none is None
        _same(without, expected)


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        *SMALL,
        (3, 5000),
        (2, 17000),
        *([] if INTERPRETED else [*LARGE, (512, 5120), (300, 9000), (40, 32768)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["layernorm", "layernorm_without_beta", "rmsnorm"])
def test_fused_norm_codes_and_statistics_equal_separate_quantization(shape, kind):
    x = (torch.randn(shape, device=DEVICE) * 2.0 + 0.3).bfloat16()
    weight, bias = (torch.randn(shape[1], device=DEVICE).bfloat16() for _ in range(2))
    bias = None if kind == "layernorm_without_beta" else bias
    spec = QuantizeSpec(
        BLOCK_1D, E4M3, rowwise=True, columnwise=False, power_of_two=shape[0] % 2 == 0, epsilon=1e-3
    )
    wide = kind != "rmsnorm" and shape[1] > 4096  # two steps
    assert norm_fuses(x, spec, centered=kind != "rmsnorm") is not wide
    if kind == "rmsnorm":
        y, *statistics = norms.rmsnorm_forward(x, weight, 1e-5, True)
        result = norms.rmsnorm_forward(x, weight, 1e-5, True, Cast(spec))
    else:
        y, *statistics = norms.layernorm_forward(x, weight, bias, 1e-5, False)
        result = norms.layernorm_forward(x, weight, bias, 1e-5, False, Cast(spec))
    _same(result[0], quantize(y, spec))
    _same(result[1:], statistics)


@runs_kernels
@DTYPES
@SHAPES
@pytest.mark.parametrize(
    "tiles", [BLOCK_1D, BLOCK_2D, FLOAT8, MXFP8], ids=["1d", "2d", "current", "mxfp8"]
)
def test_a_cast_with_column_sums_has_the_same_codes_as_the_cast(dtype, shape, tiles):
    if tiles is MXFP8 and (INTERPRETED or shape[0] % 32 or shape[1] % 32):
        pytest.skip("MXFP8 needs whole blocks and a separate kernel")
    if dtype is torch.float16 and shape != (257, 130):
        pytest.skip("one shape suffices to check that float16 is read")
    x = torch.randn(shape, device=DEVICE).to(dtype)
    spec = QuantizeSpec(
        tiles, E5M2, rowwise=True, columnwise=True, power_of_two=shape[0] % 2 == 0, epsilon=1e-4
    )
    result, sums = sums_of.column_sums(x, dtype, Cast(spec))
    _same(result, quantize(x, spec))
    assert sums.dtype == dtype
    _close_sums(sums, x)


@runs_kernels
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (256, 256), (100, 513), (700, 512)], ids=str)
def test_column_sums_equal_double_precision(dtype, shape):
    wide = torch.randn(shape[0], shape[1] + 8, device=DEVICE).to(dtype)
    for x in (wide[:, :-8].contiguous(), wide[:, 8:], wide.t().contiguous().t()[:, 1:-7]):
        assert x.shape == shape
        _close_sums(sums_of.column_sums(x, torch.float32), x)


def test_the_public_sum_takes_any_matrix(device):
    for shape in ((0, 3), (4, 0), (5, 6), (300, 520)):
        x = torch.randn(shape, device=device)
        sums = column_sums(x, torch.float32)
        torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    integral = torch.ones(7, 3, device=device, dtype=torch.float64)
    assert column_sums(integral, torch.float64).tolist() == [7.0] * 3


@pytest.mark.skipif(
    INTERPRETED, reason="graphs run no kernel in the interpreter; this test runs without it"
)
def test_a_compiled_column_sum_equals_the_eager_one(device):
    x = torch.randn(70, 40, device=device).bfloat16()
    compiled = torch.compile(column_sums, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, torch.bfloat16), column_sums(x, torch.bfloat16))


@runs_kernels
@FORMATS
def test_strided_inputs_have_the_same_codes_as_their_copies(tiles):
    wide = torch.randn(140, 600, device=DEVICE).bfloat16()
    spec = QuantizeSpec(tiles, E4M3, rowwise=True, columnwise=True, power_of_two=True)
    views = (wide[::2, 1:257], wide[:, :512], wide[:, 1:257], wide.t()[:256].t(), wide[::2, :256])
    for x in views[:1] if INTERPRETED else views:  # the interpreter takes two seconds for each view
        copy = x.clone(memory_format=torch.contiguous_format)
        for name in ("gelu", "swiglu"):
            actual = activations.activation_forward(name, x, PARAMS, Cast(spec))
            _same(actual, activations.activation_forward(name, copy, PARAMS, Cast(spec)))
            dy = x[:, : x.shape[1] // 2] if name == "swiglu" else x
            how = (PARAMS, Cast(spec), torch.float32)
            actual, _ = activations.activation_backward(name, dy, x, *how)
            expected, _ = activations.activation_backward(name, dy.clone(), copy, *how)
            _same(actual, expected)
        how = (torch.ones(x.shape[1], device=DEVICE), 1e-5, False, Cast(ROWS))
        actual, _ = norms.rmsnorm_forward(x, *how)
        expected, _ = norms.rmsnorm_forward(copy, *how)
        _same(actual, expected)


def _same_numbers(result, expected):
    """NaN codes may differ in their sign."""
    for a, b in zip(result[:4], expected[:4], strict=True):
        if b is None:
            assert a is None
            continue
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


@runs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@FORMATS
def test_nonfinite_and_extreme_numbers_have_the_separate_steps_codes(bad, tiles):
    x = torch.zeros(150, 200, device=DEVICE, dtype=torch.bfloat16)
    x[3, 7] = bad
    x[:, 150] = 3.0
    spec = QuantizeSpec(tiles, E4M3, rowwise=True, columnwise=True)
    result = activations.activation_forward("relu", x, PARAMS, Cast(spec))
    expected = quantize(activations.activation_forward("relu", x, PARAMS), spec)
    _same_numbers(result, expected)
    gamma = torch.full((200,), 2.0, device=DEVICE)
    gamma[9] = float("inf")
    beta = torch.full((200,), 100.0, device=DEVICE)
    y = norms.layernorm_forward(x, gamma, beta, 1e-5, False)[0]
    result = norms.layernorm_forward(x, gamma, beta, 1e-5, False, Cast(ROWS))[0]
    _same_numbers(result, quantize(y, ROWS))


@runs_kernels
def test_a_gated_gradient_whose_halves_do_not_end_a_block_takes_two_steps():
    spec = QuantizeSpec(BLOCK_1D, E4M3, rowwise=True, columnwise=True)
    for width, fused in ((256, True), (128, False), (300, False)):
        x = torch.randn(40, width, device=DEVICE).bfloat16()
        assert activation_fuses("swiglu", x, spec, torch.float32, backward=True) == fused
        assert activation_fuses("gelu", x, spec, torch.float32, backward=True)


@runs_kernels
@FORMATS
def test_a_norm_in_both_directions_takes_two_steps(tiles):
    x = torch.randn(40, 256, device=DEVICE).bfloat16()
    spec = QuantizeSpec(tiles, E4M3, rowwise=True, columnwise=True)
    assert not norm_fuses(x, spec, centered=False)
    result, statistic = norms.rmsnorm_forward(
        x, torch.ones(256, device=DEVICE), 1e-5, False, Cast(spec)
    )
    y, expected = norms.rmsnorm_forward(x, torch.ones(256, device=DEVICE), 1e-5, False)
    _same(result, quantize(y, spec))
    assert torch.equal(statistic, expected)


@runs_kernels
def test_rows_alone_with_column_sums_take_two_steps():
    x = torch.randn(40, 256, device=DEVICE).bfloat16()
    for spec in (ROWS, QuantizeSpec(BLOCK_1D, E4M3, rowwise=True, columnwise=True)):
        assert activation_fuses("swiglu", x, spec, backward=True)
        assert activation_fuses("swiglu", x, spec, torch.float32, backward=True) == spec.columnwise


@pytest.mark.gpu
def test_a_forced_reference_quantization_is_not_fused_away():
    x = torch.randn(64, 64, device="cuda").bfloat16()
    spec = QuantizeSpec(BLOCK_1D, E4M3)
    assert activation_fuses("gelu", x, spec, backward=False)
    with use_backend(quantize="reference"):
        assert not activation_fuses("gelu", x, spec, backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("tiles", [BLOCK_1D, FLOAT8], ids=["1d", "current"])
def test_observers_are_called_once_per_quantization(tiles, columnwise):
    x = torch.randn(64, 256, device="cuda").bfloat16()
    spec, records = QuantizeSpec(tiles, E4M3, True, columnwise), []
    with observing(lambda operation, request: records.append(operation)):
        norms.rmsnorm_forward(x, x[0], 1e-5, False, Cast(spec))
        activations.activation_forward("gelu", x, PARAMS, Cast(spec))
        activations.activation_backward("gelu", x, x, PARAMS, Cast(spec))
        activations.activation_backward("gelu", x, x, PARAMS, Cast(spec), torch.float32)
        column_sums(x, torch.float32, Cast(spec))
    assert records.count("quantize") == 5

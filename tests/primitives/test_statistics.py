"""Quantization statistics: literal float64 sums for every format and direction, and the kernel's."""

from __future__ import annotations

import math

import pytest
import torch

import transformer_engine.pytorch as te
from tests.primitives.by_kernels import Kernels
from tests.support.kernels import INTERPRETED
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives import statistics
from transformer_engine.pytorch.primitives.operand import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.primitives.quantize import dequantize
from transformer_engine.pytorch.primitives.statistics import FIELDS, new_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


def measure_by_reference(*arguments):
    with use_backend(statistics="reference"):
        statistics.take_in_statistics(*arguments)


KERNEL = pytest.param(
    Kernels(statistics, "statistics").take_in_statistics,
    id="triton",
    marks=() if INTERPRETED else pytest.mark.gpu,
)
RUN = pytest.mark.parametrize("run", [pytest.param(measure_by_reference, id="reference"), KERNEL])
QUANTIZERS = {
    "delayed": lambda: te.Float8Quantizer(
        torch.full((1,), 64.0, device=DEVICE), torch.zeros(1, device=DEVICE), te.DType.kFloat8E4M3
    ),
    "gradient": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, DEVICE),
    "rows": lambda: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "squares": lambda: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2
    ),
    "mxfp8": lambda: te.MXFP8Quantizer(te.DType.kFloat8E4M3),
    "nvfp4": lambda: te.NVFP4Quantizer(with_rht=False),
}


def sample(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    """Numbers across twelve orders of magnitude, some of them 0."""
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randn(rows, columns, generator=generator)
    values = values * 10.0 ** torch.randint(-9, 3, values.shape, generator=generator)
    return torch.where(torch.rand(values.shape, generator=generator) < 0.05, 0.0, values).to(
        DEVICE, dtype
    )


def literal(x: torch.Tensor, operand) -> dict[str, float]:
    values = x.double().cpu()
    results = {
        "maximum": values.abs().max().item(),
        "signal": values.square().sum().item(),
        "underflow": 0.0,
        "saturation": 0.0,
        "noise": 0.0,
        "nonfinite": 0.0,
    }
    if operand is not None:
        quantized = dequantize(operand._replace(dtype=torch.float32)).double().cpu()
        results["noise"] = (values - quantized).square().sum().item()
        results["underflow"] = ((values != 0) & (quantized == 0)).sum().item()
    return results


@RUN
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("axis", [ROWWISE, COLUMNWISE], ids=["rows", "columns"])
def test_every_format_is_measured_against_its_values(run, name: str, axis: str):
    x = sample(64, 288)
    operand = QUANTIZERS[name]().encode(x, True, True).contract(axis)
    matrix = x if axis == ROWWISE else x.t()
    saved = new_row(DEVICE)
    run(matrix, operand, saved)
    measured = dict(zip(FIELDS, saved.tolist(), strict=True))
    expected = literal(matrix, operand)
    for field in ("maximum", "underflow", "nonfinite"):
        assert measured[field] == expected[field], field
    for field in ("signal", "noise"):
        assert math.isclose(measured[field], expected[field], rel_tol=1e-5), field


@RUN
def test_values_beyond_the_largest_code_are_counted(run):
    # 7.25 is half a step beyond
    x = torch.tensor([[1.0, 7.0, 7.2, -8.0], [0.0, 1e-9, -7.3, 3.0]], device=DEVICE)
    operand = QUANTIZERS["delayed"]().encode(x, True, False).contract(ROWWISE)  # up to 448 / 64 = 7
    saved = new_row(DEVICE)
    run(x, operand, saved)
    measured = dict(zip(FIELDS, saved.tolist(), strict=True))
    assert (measured["saturation"], measured["underflow"], measured["maximum"]) == (2.0, 1.0, 8.0)


@RUN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_values_are_counted_and_left_out(run, dtype: torch.dtype):
    x = torch.ones(40, 200, dtype=dtype, device=DEVICE)
    x[3, 5], x[17, 199], x[39, 0] = float("nan"), float("inf"), -float("inf")
    saved = new_row(DEVICE)
    run(x, None, saved)
    assert saved.tolist() == [1.0, 0.0, 0.0, 40 * 200 - 3, 0.0, 3.0]


@RUN
@pytest.mark.parametrize("shape", [(64, 256), (40, 200)], ids=["whole tiles", "parts"])
def test_nonfinite_values_are_left_out_of_the_comparison_with_codes(run, shape):
    x = sample(*shape).clamp(-7, 7)
    expected, saved = new_row(DEVICE), new_row(DEVICE)
    broken = x.clone()
    for index, value in (((3, 5), math.nan), ((17, shape[1] - 1), math.inf)):
        x[index], broken[index] = 0.0, value
    measure_by_reference(
        x, QUANTIZERS["delayed"]().encode(x, True, False).contract(ROWWISE), expected
    )
    run(broken, QUANTIZERS["delayed"]().encode(broken, True, False).contract(ROWWISE), saved)
    torch.testing.assert_close(saved[:-1], expected[:-1], rtol=1e-5, atol=0.0)
    assert saved[-1] == 2


@RUN
def test_a_row_accumulates_over_matrices(run):
    saved = new_row(DEVICE)
    run(torch.full((8, 16), 2.0, device=DEVICE), None, saved)
    run(torch.full((8, 16), -1.0, device=DEVICE), None, saved)
    assert saved.tolist() == [2.0, 0.0, 0.0, 8 * 16 * 5.0, 0.0, 0.0]


@RUN
def test_noncontiguous_rows_are_read_in_place(run):
    wide = sample(40, 512)
    saved, same = new_row(DEVICE), new_row(DEVICE)
    run(wide[:, 128:256], None, saved)
    run(wide[:, 128:256].contiguous(), None, same)
    assert torch.equal(saved, same)


def test_a_matrix_without_elements_changes_nothing():
    saved = new_row(DEVICE)
    statistics.take_in_statistics(torch.empty(0, 16, device=DEVICE), None, saved)
    assert saved.tolist() == [0.0] * 6

"""Grouped quantization gives each group the codes, scales and recorded maximum of quantizing it alone."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.pytorch.primitives.grouped_gemm import Matrices, make_groups
from transformer_engine.pytorch.primitives.grouped_quantize import (
    ScaleSlots,
    quantize_matrices,
    quantize_matrices_separately,
    quantize_rows,
    quantize_rows_separately,
    row_sums,
)
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, quantize

DEPTH = 272
SPLITS = {
    "one": (77,),
    "even": (128, 256, 128),
    "ragged": (3, 131, 0, 0, 70, 1, 258, 17),
    "empty first and last": (0, 16, 300, 0),
}
DIRECTIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
SCALINGS = {
    "given": {"format": FLOAT8, "element": E4M3},
    "current": {"format": FLOAT8, "element": E5M2},
    "power of two": {"format": FLOAT8, "element": E4M3, "power_of_two": True, "epsilon": 0.5},
    "block": {"format": BLOCK_1D, "element": E4M3, "power_of_two": True},
    "block float32": {"format": BLOCK_1D, "element": E5M2},
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def make_slots(count: int, device) -> ScaleSlots:
    """Slots 1, 4, 7 .. in a state with 3 slots per group."""
    scale = torch.rand(3 * count, device=device) * 8 + 1
    history = torch.zeros(4, 3 * count, device=device)
    history[0, 1] = 100.0
    return ScaleSlots(scale, history, 3, 1)


def values(rows: int, device, dtype=torch.bfloat16) -> torch.Tensor:
    x = (
        torch.randn(rows, DEPTH, device=device)
        * torch.logspace(-3, 3, rows, device=device)[:, None]
    )
    return x.to(dtype)


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", SCALINGS)
def test_each_group_of_rows_is_quantized_as_if_alone(name, splits, directions, dtype, device):
    x = values(sum(splits), device, dtype)
    spec = QuantizeSpec(rowwise=directions[0], columnwise=directions[1], **SCALINGS[name])
    slots = make_slots(len(splits), device) if name == "given" else None
    result = quantize_rows(x, make_groups(splits, x.shape[0], x.device), spec, slots)
    first, first_t = 0, 0
    tiles = -(-DEPTH // 128)
    for group, part in enumerate(x.split(splits)):
        rows, padded = len(part), -(-len(part) // 128) * 128
        scale = None if slots is None else slots.of_group(group)[0]
        with use_backend(quantize="reference"):
            alone = quantize(part, spec, multiplier=scale)
        if slots is not None:
            recorded = slots.of_group(group)[1]
            start = 100.0 if group == 0 else 0.0
            assert recorded == torch.clamp(alone.amax, min=start)
        if spec.rowwise:
            assert torch.equal(bits(result.codes[first : first + rows]), bits(alone.codes))
            if spec.format == FLOAT8:
                assert rows == 0 or torch.equal(result.scale[group, :1], alone.scale)
            else:
                scales = result.scale[first * tiles : (first + rows) * tiles]
                assert torch.equal(scales.view(tiles, rows).t(), alone.scale)
        if spec.columnwise:
            codes_t = result.codes_t[first_t * DEPTH : (first_t + padded) * DEPTH].view(
                DEPTH, padded
            )
            assert torch.equal(bits(codes_t[:, :rows]), bits(alone.codes_t))
            assert not bits(codes_t[:, rows:]).any()
            if spec.format == FLOAT8:
                assert rows == 0 or torch.equal(result.scale_t[group, :1], alone.scale_t)
            else:
                scales = result.scale_t[first_t // 128 * DEPTH : (first_t + padded) // 128 * DEPTH]
                assert torch.equal(scales.view(-1, DEPTH).t(), alone.scale_t)
        first, first_t = first + rows, first_t + padded


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", ["given", "current", "power of two", "block"])
def test_tiled_columns_equal_contiguous_columns_per_128_rows(name, splits, device):
    x = values(sum(splits), device)
    spec = QuantizeSpec(rowwise=True, columnwise=True, **SCALINGS[name])
    groups = make_groups(splits, x.shape[0], x.device)
    slots = make_slots(len(splits), device) if name == "given" else None
    contiguous, tiled = (
        quantize_rows(x, groups, spec, slots, tiled=tiled) for tiled in (False, True)
    )
    assert torch.equal(bits(tiled.codes), bits(contiguous.codes))
    scales = (tiled.scale_t, contiguous.scale_t)
    assert torch.equal(*scales if name == "block" else [scale[:, 0] for scale in scales])
    assert tiled.codes_t.shape == (groups.padded // 128, DEPTH, 128)
    first = 0
    for rows in splits:
        count = -(-rows // 128)
        part = bits(contiguous.codes_t[first * 128 * DEPTH : (first + count) * 128 * DEPTH])
        tiles = bits(tiled.codes_t[first : first + count])
        assert torch.equal(tiles.transpose(0, 1).reshape(-1), part)
        first += count
    assert first * 128 == groups.padded


@pytest.mark.gpu
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", ["current", "power of two"])
def test_many_row_groups_are_measured_and_cast_as_if_alone(name, tiled, directions, device):
    splits = (300, 0, 1, 128, 777, 2048, 16, 0, *(37 * i % 700 for i in range(56)))
    x = torch.randn(sum(splits), 2048, device=device, dtype=torch.bfloat16)
    x[5, 7], x[430, 3], x[2000] = torch.inf, torch.nan, 0
    x *= torch.logspace(-3, 3, len(x), device=device)[:, None]
    spec = QuantizeSpec(rowwise=directions[0], columnwise=directions[1], **SCALINGS[name])
    groups = make_groups(splits, len(x), x.device)
    unknown = groups._replace(rows=None)  # measured in a launch before the cast
    for _ in range(3):
        known, expected = (
            quantize_rows(x, each, spec, tiled=tiled and spec.columnwise)
            for each in (groups, unknown)
        )
        for result, other in zip(known, expected, strict=True):
            if result is not None and other is not None:
                scales = result.dtype == torch.float32
                pair = (result[:, 0], other[:, 0]) if scales else (bits(result), bits(other))
                assert torch.equal(*pair)


@pytest.mark.gpu
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("shape", [(1408, 2048), (384, 192), (1000, 400)])
@pytest.mark.parametrize("name", ["current", "power of two"])
def test_many_matrices_are_measured_and_cast_as_if_alone(name, shape, directions, device):
    matrices = [torch.randn(shape, device=device, dtype=torch.bfloat16) * 2.0**i for i in range(40)]
    matrices[3].zero_()
    matrices[7][5, 7] = torch.inf
    matrices[39][-1, -1] = torch.nan
    spec = QuantizeSpec(rowwise=directions[0], columnwise=directions[1], **SCALINGS[name])
    for _ in range(3):
        result = quantize_matrices(Matrices.of(matrices), spec)
        for group, matrix in enumerate(matrices):
            with use_backend(quantize="reference"):
                alone = quantize(matrix, spec)
            if spec.rowwise:
                assert torch.equal(bits(result.codes[group]), bits(alone.codes))
                assert torch.equal(result.scale[group, :1], alone.scale)
            if spec.columnwise:
                assert torch.equal(bits(result.codes_t[group]), bits(alone.codes_t))


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("shape", [(256, 128), (144, 272)])
@pytest.mark.parametrize("name", ["given", "current", "power of two", "square", "square float32"])
def test_each_matrix_is_quantized_as_if_alone(name, shape, directions, device):
    matrices = [torch.randn(shape, device=device, dtype=torch.bfloat16) * 2.0**i for i in range(5)]
    squares = {
        "square": {"format": BLOCK_2D, "element": E4M3, "power_of_two": True},
        "square float32": {"format": BLOCK_2D, "element": E5M2, "epsilon": 0.5},
    }
    spec = QuantizeSpec(
        rowwise=directions[0], columnwise=directions[1], **(SCALINGS | squares)[name]
    )
    slots = make_slots(5, device) if name == "given" else None
    result = quantize_matrices(Matrices.of(matrices), spec, slots)
    for group, matrix in enumerate(matrices):
        with use_backend(quantize="reference"):
            alone = quantize(
                matrix, spec, multiplier=None if slots is None else slots.of_group(group)[0]
            )
        for ours, reference in zip(result[:4], alone[:4], strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                actual = bits(ours[group]).reshape(-1)
                assert torch.equal(actual[: reference.numel()], bits(reference).reshape(-1))


def test_groups_with_two_levels_of_scales_are_quantized_as_if_alone(device):
    splits, spec = (
        (64, 0, 32),
        QuantizeSpec(NVFP4, E2M1, rowwise=True, columnwise=True, hadamard=True),
    )
    x, groups = values(96, device), make_groups((64, 0, 32), 96, device)
    result = quantize_rows_separately(x, groups, spec, quantize)
    matrices = Matrices.of([values(32, device) for _ in range(3)])
    stack = quantize_matrices_separately(matrices, spec, quantize)
    for group, part in enumerate(x.split(splits)):
        first = sum(splits[:group])
        if len(part):
            alone = quantize(part, spec)
            rows = [
                result.codes[first : first + len(part)],
                result.scale[first : first + len(part)],
            ]
            columns = [
                result.codes_t[:, first // 2 : (first + len(part)) // 2],
                result.scale_t[:, first // 16 : (first + len(part)) // 16],
            ]
            maxima = [result.amax[group, None], result.amax_t[group, None]]
            for ours, reference in zip([*rows, *columns, *maxima], alone, strict=True):
                assert torch.equal(bits(ours), bits(reference))
        else:
            assert result.amax[group] == result.amax_t[group] == 0
        for ours, reference in zip(stack, quantize(matrices.tensors[group], spec), strict=True):
            assert torch.equal(bits(ours[group]).reshape(-1), bits(reference).reshape(-1))
    with pytest.raises(ValueError, match="unknown on the host"):
        quantize_rows_separately(x, groups._replace(rows=None), spec, quantize)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_one_groups_values_do_not_change_other_groups_scales(value, device):
    x = values(256, device)
    x[:128] = value
    spec = QuantizeSpec(FLOAT8, E4M3, rowwise=True, columnwise=True)
    result = quantize_rows(x, make_groups((128, 128), 256, x.device), spec)
    alone = quantize(x[128:], spec)
    assert result.scale[0, 0] == 1.0
    assert torch.equal(result.scale[1, :1], alone.scale)
    assert torch.equal(bits(result.codes[128:]), bits(alone.codes))


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_layouts_made_on_device_and_host_are_equal(splits, device):
    listed = make_groups(splits, sum(splits), device)
    for dtype in (torch.int32, torch.int64):
        result = make_groups(torch.tensor(splits, dtype=dtype, device=device), sum(splits), device)
        assert torch.equal(result.layout, listed.layout)
        assert result.read_rows == splits
        assert result.padded >= listed.padded


def test_row_sums_equal_per_group_float32_sums(device):
    splits = SPLITS["ragged"]
    x = values(sum(splits), device)
    sums = row_sums(x, make_groups(splits, x.shape[0], x.device))
    expected = torch.stack([part.double().sum(0) for part in x.split(splits)])
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)


def test_formats_without_a_grouped_form_are_rejected(device):
    x = values(64, device)
    with pytest.raises(ValueError, match="not to nvfp4"):
        quantize_rows(x, make_groups((64,), 64, x.device), QuantizeSpec(NVFP4, E2M1))
    with pytest.raises(
        ValueError, match=r"rows are \[24, 40\]; mxfp8 columns need known multiples of 32"
    ):
        quantize_rows(
            x, make_groups((24, 40), 64, x.device), QuantizeSpec(MXFP8, E4M3, columnwise=True)
        )
    with pytest.raises(ValueError, match="not to block1d"):
        quantize_matrices(Matrices.of([x]), QuantizeSpec(BLOCK_1D, E4M3))


@pytest.mark.parametrize(
    "splits",
    [(3, 4), (8, -1), torch.tensor([[7]]), torch.tensor([3.5, 3.5])],
    ids=["sum", "sign", "2d", "float"],
)
def test_invalid_splits_are_rejected(splits, device):
    with pytest.raises(ValueError, match="splits"):
        make_groups(splits, 8, device)

"""Scales in matrix-instruction order: quantized tensors, layer weights and groups with swizzled scales.

The expected order is the formula in cuBLAS's documentation, byte by byte: scale (r, c) in [R, C], padded to
multiples of 128 x 4, is at ((r // 128) (C / 4) + c // 4) 512 + (r % 32) 16 + (r % 128 // 32) 4 + c % 4.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.tensor.quantizer_cases import CASES
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.primitives.scale_order import compact, swizzled

RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    # Without random numbers, which differ from one call to the next.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# Whole tiles; a part of a tile in either direction; fewer rows or columns than a tile; leading dimensions.
SHAPES = ((256, 512), (160, 96), (32, 64), (2, 48, 160))


@pytest.fixture(autouse=True)
def _emulated():
    with te.emulate():
        yield


def swizzle_by_formula(scale: torch.Tensor) -> torch.Tensor:
    """One-byte scales [R, C] in swizzled order, uint8, padded with zeros."""
    rows, columns = scale.shape
    width = -(-columns // 4)
    tiles = torch.zeros(-(-rows // 128) * 128, width * 4, dtype=torch.uint8)
    r, c = (
        index.flatten()
        for index in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    places = (r // 128 * width + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    tiles.view(-1)[places] = scale.view(torch.uint8).flatten()
    return tiles


def create_quantizer(name: str) -> Any:
    return CASES[name]("cpu")


def with_swizzled_scales(tensor: Any) -> Any:
    """Swizzle both directions' scales in a quantized tensor; their memory keeps its shape."""
    fields = tensor.get_metadata()
    dtype = fields.pop("dtype")
    fields.pop("with_gemm_swizzled_scales", None)
    fields["rowwise_scale_inv"] = swizzle_by_formula(fields["rowwise_scale_inv"])
    scale_t = fields["columnwise_scale_inv"]
    if isinstance(tensor, te.MXFP8Tensor):  # stored as [M / 32, K], swizzled as its transpose
        fields["columnwise_scale_inv"] = swizzle_by_formula(scale_t.t()).view(scale_t.shape)
    else:
        fields["columnwise_scale_inv"] = swizzle_by_formula(scale_t)
    return type(tensor)(tensor.shape, dtype, **fields, with_gemm_swizzled_scales=True)


@pytest.mark.parametrize(
    "extents", [(1, 1), (33, 3), (128, 4), (129, 5), (300, 40), (512, 64)], ids=str
)
def test_the_order_is_the_formula_and_can_be_reversed(extents):
    scale = torch.randint(0, 256, extents, dtype=torch.uint8)
    result = swizzled(scale)
    assert torch.equal(result, swizzle_by_formula(scale))
    assert torch.equal(compact(result)[: extents[0], : extents[1]], scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_quantizers_for_products_write_the_scales_that_others_write_in_rows(name, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    plain, fused = create_quantizer(name), create_quantizer(name)
    fused.optimize_for_gemm = True
    matrix = x.view(-1, shape[-1])
    for expected, actual in zip(
        plain.operands(matrix, True, True), fused.operands(matrix, True, True), strict=True
    ):
        assert torch.equal(actual.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(actual.scale.view(torch.uint8), swizzle_by_formula(expected.scale))
        assert actual.format.in_tiles and not expected.format.in_tiles


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_quantizer_for_products_makes_tensors_of_swizzled_scales(name, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    plain, fused = create_quantizer(name), create_quantizer(name)
    fused.optimize_for_gemm = True
    result, expected = fused(x), with_swizzled_scales(plain(x))
    assert (
        result._with_gemm_swizzled_scales is True and plain(x)._with_gemm_swizzled_scales is False
    )
    for field, value in expected.get_metadata().items():
        actual = result.get_metadata()[field]
        assert field == "quantizer" or (
            torch.equal(actual, value) if isinstance(value, torch.Tensor) else actual == value
        ), field
    assert torch.equal(result.dequantize(), plain(x).dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_of_swizzled_scales_are_copied_sliced_and_stored_like_others(name):
    quantizer = create_quantizer(name)
    x, other = (
        torch.randn(256, 128, dtype=torch.bfloat16),
        torch.randn(256, 128, dtype=torch.bfloat16),
    )
    plain = quantizer(x)
    quantizer.optimize_for_gemm = True
    result = quantizer(x)
    for rows in (slice(0, 128), slice(64, 256)):
        assert torch.equal(result[rows].dequantize(), plain[rows].dequantize())
    for part, expected in zip(result.split(128), plain.split(128), strict=True):
        assert torch.equal(part.dequantize(), expected.dequantize())
    assert result.clone()._with_gemm_swizzled_scales is True
    stored = io.BytesIO()
    torch.save(result, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert loaded._with_gemm_swizzled_scales is True and torch.equal(
        loaded.dequantize(), plain.dequantize()
    )
    # Bytes and values are written in the target's order.
    for source, target in ((quantizer(other), plain), (plain, result)):
        target.copy_from_storage(source)
        assert torch.equal(target.dequantize(), source.dequantize())
    result.quantize_(x)
    assert result._with_gemm_swizzled_scales is True
    assert torch.equal(result.dequantize(), quantizer(x).dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_values_written_to_rows_reach_a_tensor_of_swizzled_scales(name):
    quantizer = create_quantizer(name)
    quantizer.set_usage(columnwise=False)
    quantizer.optimize_for_gemm = True
    full = quantizer(torch.ones(256, 128, dtype=torch.bfloat16))
    full[128:].copy_(torch.full((128, 128), 0.5, dtype=torch.bfloat16))
    values = full.dequantize()
    assert torch.equal(values[:128], torch.ones_like(values[:128]))
    assert torch.equal(values[128:], torch.full_like(values[128:], 0.5))


@pytest.mark.parametrize("name", RECIPES)
def test_groups_of_a_quantizer_for_products_have_swizzled_scales(name):
    quantizer = create_quantizer(name)
    x = torch.randn(256, 128, dtype=torch.bfloat16)
    plain = tex.group_quantize(x, quantizer, 2, None)
    quantizer.optimize_for_gemm = True
    result = tex.group_quantize(x, quantizer, 2, None)
    assert result._with_gemm_swizzled_scales is True and plain._with_gemm_swizzled_scales is False
    assert torch.equal(result.dequantize(), plain.dequantize())
    for member, expected in zip(result.members(), plain.members(), strict=True):
        assert torch.equal(
            member._rowwise_scale_inv, swizzle_by_formula(expected._rowwise_scale_inv)
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_tensors_with_swizzled_scales_have_the_same_values_in_both_directions(name, shape):
    result = create_quantizer(name)(torch.randn(shape, dtype=torch.bfloat16))
    actual = with_swizzled_scales(result)
    assert torch.equal(actual.dequantize(), result.dequantize())
    for tensor in (actual, result):
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(actual.dequantize(), result.dequantize())


@pytest.mark.parametrize("sizes", [(128, 256), (96, 160)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_reads_a_weight_with_swizzled_scales(name, sizes):
    depth, width = sizes
    with te.quantized_model_init(recipe=RECIPES[name]):
        layer = te.Linear(depth, width, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(64, depth, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(64, width, dtype=torch.bfloat16)

    def results() -> list[torch.Tensor]:
        with te.autocast(recipe=RECIPES[name]):
            y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)]

    expected = results()
    weight = with_swizzled_scales(layer.weight.detach())
    layer.weight = torch.nn.Parameter(weight)
    for actual, reference in zip(results(), expected, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("name", RECIPES)
def test_swizzled_scales_of_parts_are_rejected(name):
    result = create_quantizer(name)(torch.randn(64, 64, dtype=torch.bfloat16))
    fields = result.get_metadata()
    dtype, scale = fields.pop("dtype"), fields["rowwise_scale_inv"]
    fields.pop("with_gemm_swizzled_scales", None)
    fields["rowwise_scale_inv"] = scale[:64]
    with pytest.raises(ValueError, match=r"not a multiple of \(128, 4\); pad them"):
        type(result)(result.shape, dtype, **fields, with_gemm_swizzled_scales=True)

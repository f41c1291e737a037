"""Quantizers whose operands have scales in the order of products: codes, scales and products are those in rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transformer_engine.common import formats
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functions.saving import pack, unpack
from transformer_engine.pytorch.primitives.gemm import Epilogue, GemmRequest, gemm
from transformer_engine.pytorch.primitives.gemm.swizzle import swizzle_operand_scale
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import dequantize, quantize
from transformer_engine.pytorch.primitives.scale_order import compact, row_major, swizzled
from transformer_engine.pytorch.tensor import block_scaling
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

QUANTIZERS = {
    "mxfp8": lambda: MXFP8Quantizer(DType.kFloat8E4M3),
    "mxfp8 square": lambda: MXFP8Quantizer(DType.kFloat8E5M2, with_2d_quantization=True),
    "nvfp4": lambda: NVFP4Quantizer(),
    "nvfp4 hadamard": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4 square": lambda: NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 rows": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
}


def both(
    name: str, rows: int = 160, depth: int = 96
) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Operands with the same values in rows, and in tiles."""
    x = torch.randn(rows, depth).bfloat16()
    plain, tiled = QUANTIZERS[name](), QUANTIZERS[name]()
    tiled.optimize_for_gemm = True
    return tuple(plain.operands(x, True, True)), tuple(tiled.operands(x, True, True))  # pyright: ignore


@pytest.mark.parametrize("name", QUANTIZERS)
def test_operands_in_tiles_hold_the_scales_of_those_in_rows(name):
    for row, tile in zip(*both(name), strict=True):
        assert tile.format is formats.TILED_FORMATS[row.format] and tile.format.in_tiles  # pyright: ignore
        assert torch.equal(tile.codes.view(torch.uint8), row.codes.view(torch.uint8))
        assert torch.equal(tile.scale.view(torch.uint8), swizzled(row.scale))  # pyright: ignore
        assert torch.equal(swizzle_operand_scale(tile), swizzle_operand_scale(row))
        back = row_major(tile)
        assert back.format is row.format and torch.equal(
            back.scale.view(torch.uint8), row.scale.view(torch.uint8)
        )  # pyright: ignore
        assert torch.equal(dequantize(tile), dequantize(row))
        (saved,) = unpack(*pack(tile))
        assert saved.format is tile.format and torch.equal(dequantize(saved), dequantize(row))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_products_of_operands_in_tiles_have_the_bits_of_those_in_rows(name):
    (row, _), (tile, _) = both(name)
    (other, _), (other_tile, _) = both("mxfp8" if "mxfp8" in name else "nvfp4", 64)
    expected = gemm(row, other, Epilogue(torch.bfloat16))
    for left, right in ((tile, other_tile), (tile, other), (row, other_tile)):
        request = GemmRequest.of(left, right, Epilogue(torch.bfloat16))
        assert (request.a_format, request.b_format) == (
            row.format,
            other.format,
        ) and not request.power_of_two
        assert torch.equal(gemm(left, right, Epilogue(torch.bfloat16)), expected)


@pytest.mark.parametrize("form", [formats.MXFP8, formats.NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(32, 32), (130, 66), (1, 34), (256, 256)])
def test_the_reference_swizzles_what_it_quantizes(form, shape):
    element = formats.E4M3 if form == formats.MXFP8 else formats.E2M1
    spec = QuantizeSpec(form, element)
    x = torch.randn(shape)
    plain, tiled = quantize(x, spec), quantize(x, dataclasses.replace(spec, tiled=True))
    assert torch.equal(tiled.codes.view(torch.uint8), plain.codes.view(torch.uint8))  # pyright: ignore
    assert tiled.scale.dtype == plain.scale.dtype  # pyright: ignore
    scales = compact(tiled.scale.view(torch.uint8))  # pyright: ignore
    rows, columns = plain.scale.shape  # pyright: ignore
    assert torch.equal(scales[:rows, :columns], plain.scale.view(torch.uint8))  # pyright: ignore
    assert not scales[rows:].any() and not scales[:, columns:].any()


def test_formats_with_float32_scales_have_no_tiles():
    with pytest.raises(
        ValueError, match="tiled=True is for scales of one byte, which block1d has not"
    ):
        QuantizeSpec(formats.BLOCK_1D, formats.E4M3, tiled=True)
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3)
    quantizer.optimize_for_gemm = True
    assert (
        quantizer.operands(torch.randn(64, 64), True, False).rowwise.format
        == formats.BLOCK_2D_POWERS
    )  # pyright: ignore


class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)  # pyright: ignore


@pytest.mark.parametrize(
    ("hardware", "tiles"), [(nvidia(9, 0), False), (nvidia(10, 0), True), (nvidia(12, 0), True)]
)
@pytest.mark.parametrize("split", [False, True])
def test_layers_request_tiles_where_products_read_them(monkeypatch, hardware, tiles, split):
    monkeypatch.setattr(block_scaling, "current_hardware", lambda: hardware)
    monkeypatch.setattr(block_scaling, "_PLAIN", (OnGpu,))
    x = torch.randn(64, 64).as_subclass(OnGpu)
    monkeypatch.setattr(MXFP8Quantizer, "tiled_operands", lambda self, *arguments: "tiles")
    monkeypatch.setattr(MXFP8Quantizer, "operands", lambda self, *arguments: "rows")
    result: object = MXFP8Quantizer(DType.kFloat8E4M3).product_operands(x, True, True, split)
    assert result == ("tiles" if tiles and not split else "rows")

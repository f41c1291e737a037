"""values [rows, K] = codes * scale, whatever the format."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, MXFP8, NVFP4, TENSOR_FORMATS
from ..operand import Operand
from . import tiles
from .e2m1 import decode_e2m1, unpack_fp4
from .mxfp8 import e8m0_to_float
from .nvfp4 import global_decode_scale


def widen(codes: Tensor) -> Tensor:
    """float8 codes as float32, exactly."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # torch's own cast takes 10.7 ms for 2048 x 2048 on one core, a table of the 256 values 2.5 ms.
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
        indices = codes.view(torch.uint8).flatten().to(torch.int32)
        return table.index_select(0, indices).view(codes.shape)
    return codes.to(torch.float32)


def dequantize(operand: Operand) -> Tensor:
    """values [rows, K] = codes * scale, in float32 with one final rounding to operand.dtype."""
    codes, scale, form = operand.codes, operand.scale, operand.format
    if form is None:
        return codes.to(operand.dtype)
    if scale is None:
        raise ValueError(
            f"an operand of format {form.name} needs its scale, which is None; pass the one that `quantize` returned"
        )
    if form.name == FLOAT8.name:
        return (widen(codes) * scale).to(operand.dtype)
    if form.name not in (BLOCK_1D.name, BLOCK_2D.name, MXFP8.name, NVFP4.name) or form.block is None:
        names = ", ".join(known.name for known in TENSOR_FORMATS)
        raise ValueError(f"no rule to dequantize format {form.name!r}; choose one of {names}")
    if form.name == NVFP4.name:
        values = _two_level(operand, scale, form.block)
    else:
        decoded = e8m0_to_float(scale) if form.name == MXFP8.name else scale
        values = tiles.cut(widen(codes), form.block) * tiles.spread(decoded)
    return tiles.join(values.to(operand.dtype), (operand.rows, operand.depth))


def _two_level(operand: Operand, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Tiles of code * block scale * global scale."""
    if operand.amax is None:
        raise ValueError(
            "an nvfp4 operand needs the tensor's amax for its second scale, which is None; "
            "pass the one that `quantize` returned"
        )
    codes = tiles.cut(decode_e2m1(unpack_fp4(operand.codes)), block)
    # The first product has at most 6 significant bits and is exact, so only the second rounds.
    return codes * tiles.spread(widen(scale)) * global_decode_scale(operand.amax)

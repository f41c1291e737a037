"""Products of narrow codes at bf16 speed: codes times power-of-two or E4M3 block scales are exact in bfloat16.

A bfloat16 holds 8 significant bits. An FP8 code has at most 4, so FP8 codes and MXFP8 values (a code times a power
of two) are exact; an NVFP4 value is a 2-bit code times a 4-bit E4M3 scale, 6 bits. A scale of a whole tensor or of a
row is applied to the float32 sum. Scales beyond bfloat16's range (2^-126 to 2^127) are the exception.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..operand import Operand
from ..quantize import dequantize
from .reference import at_unit_amax, has_row_scales, with_second_level
from .request import EPILOGUES, Epilogue, GemmRequest


def refuses(request: GemmRequest) -> str | None:
    if request.device != "cuda":
        return f"it is for GPUs; on {request.device} bfloat16 products are no faster than float32"
    if request.empty:
        return "there is nothing to multiply"
    if request.capability < (8, 0):
        return (
            f"compute capability {request.capability[0]}.{request.capability[1]} has no bfloat16 tensor cores"
        )
    for fmt in (request.a_format, request.b_format):
        if fmt is None:
            return "an operand is not quantized"
        if not fmt.fits_bfloat16:
            return f"{fmt.name} scales may be any float32; their product with a code needs more bits than bfloat16 has"
    return None


def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    product = torch.mm(_codes_in_bfloat16(a), _codes_in_bfloat16(b).t(), out_dtype=torch.float32)
    if has_row_scales(a, b):
        for operand in (a, b):
            if operand.format is not None and operand.format.unit_amax is None:
                product = product * _tensor_scale(operand)
        return epilogue.finish(with_second_level(product, a, b))
    return epilogue.finish(product * _tensor_scale(a) * _tensor_scale(b))


def _codes_in_bfloat16(operand: Operand) -> Tensor:
    assert operand.format is not None
    if operand.format.block is None:
        return operand.codes.to(torch.bfloat16)
    return dequantize(at_unit_amax(operand)._replace(dtype=torch.bfloat16))


def _tensor_scale(operand: Operand) -> Tensor | float:
    assert operand.format is not None
    if operand.format.block is None:
        assert operand.scale is not None
        return operand.scale
    unit = operand.format.unit_amax
    if unit is not None:
        assert operand.amax is not None
        return operand.amax / unit
    return 1.0


def _bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return run


BACKEND = Backend("widen", takes=EPILOGUES, refuses=refuses, bind=_bind)

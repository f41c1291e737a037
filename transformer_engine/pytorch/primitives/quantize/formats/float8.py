"""FP8 with one float32 scale for the whole matrix: given, or made from its absolute maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.formats import FLOAT8
from ...operand import Operand
from .. import float8
from ..float8 import absolute_maximum, scale_from_amax, widen
from ..format_row import FormatRow, Given
from ..spec import Quantized, QuantizeSpec
from ..tile_scaled import transposed
from ..triton_float8 import plan


def quantize(x: Tensor, spec: QuantizeSpec, given: Given) -> Quantized:
    """x [M, K] -> codes in the directions that spec asks for, one scale [1] for both, and the maximum."""
    multiplier, amax, record = given.multiplier, given.amax, given.record
    if amax is None:
        amax = absolute_maximum(x)
    if multiplier is None:
        multiplier = scale_from_amax(
            amax, spec.element.maximum, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    codes = float8.encode(x, spec.element, multiplier).contiguous()
    codes_t = transposed(codes) if spec.columnwise else None
    inverse = multiplier.to(torch.float32).reciprocal()
    if record is not None:
        record.copy_(torch.maximum(record, amax.reshape(record.shape)))
        amax = record
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=inverse if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=inverse if spec.columnwise else None,
        amax=amax,
    )


def dequantize(operand: Operand, scale: Tensor) -> Tensor:
    """codes * scale."""
    return (widen(operand.codes) * scale).to(operand.dtype)


ROWS = (FormatRow(FLOAT8, quantize, dequantize, plan=plan),)

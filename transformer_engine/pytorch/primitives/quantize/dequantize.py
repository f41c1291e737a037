"""values [rows, K] = codes * scale, whatever the format."""

from __future__ import annotations

from torch import Tensor

from ..operand import Operand
from .float8 import widen
from .formats import FORMATS

__all__ = ["dequantize", "widen"]


def dequantize(operand: Operand) -> Tensor:
    """values [rows, K] = codes * scale, in float32 with one final rounding to operand.dtype."""
    form = operand.format
    if form is None:
        return operand.codes.to(operand.dtype)
    if operand.scale is None:
        raise ValueError(
            f"an operand of format {form.name} needs its scale, which is None; pass the one that `quantize` returned"
        )
    row = FORMATS.get(form.name)
    if row is None:
        raise ValueError(f"no rule to dequantize format {form.name!r}; choose one of {', '.join(FORMATS)}")
    return row.dequantize(operand, operand.scale)

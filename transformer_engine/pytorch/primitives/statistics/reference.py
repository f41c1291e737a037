"""The statistics in torch operations: float32 values, float64 sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..operand import Operand
from ..quantize import dequantize
from ..quantize.e2m1 import decode_e2m1, unpack_fp4
from .request import StatisticsRequest

_GREATEST = {torch.uint8: 6.0}  # of two E2M1 codes in a byte


def bind(request: StatisticsRequest) -> Callable[[Tensor, Operand | None, Tensor], None]:
    """(x, its codes, kept) -> None: kept takes the statistics in."""

    def measure(x: Tensor, operand: Operand | None, kept: Tensor) -> None:
        values = x.float()
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        signal = values.double().square().sum()
        none = torch.zeros((), dtype=torch.float64, device=x.device)
        underflow = saturation = noise = none
        if operand is not None:
            codes, quantized = _codes(operand), dequantize(operand._replace(dtype=torch.float32))
            underflow = ((values != 0) & (codes == 0)).sum()
            saturated = (codes.abs() == greatest(operand.codes.dtype)) & (values.abs() > quantized.abs())
            saturation = saturated.sum()
            noise = torch.where(finite, values - quantized, 0.0).double().square().sum()
        sums = torch.stack([t.double() for t in (underflow, saturation, signal, noise, (~finite).sum())])
        kept[0] = torch.maximum(kept[0], values.abs().amax().double() if values.numel() else none)
        kept[1:] += sums

    return measure


def greatest(element: torch.dtype) -> float:
    """The magnitude of the largest code."""
    return _GREATEST.get(element) or torch.finfo(element).max


def _codes(operand: Operand) -> Tensor:
    """The codes' own values, without scales."""
    if operand.codes.dtype == torch.uint8:
        return decode_e2m1(unpack_fp4(operand.codes))
    return operand.codes.float()


BACKEND: Backend[StatisticsRequest] = Backend("reference", bind=bind)

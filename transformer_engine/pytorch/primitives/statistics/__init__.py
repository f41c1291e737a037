"""Accumulated quantization statistics [6] for x [M, K]: max|x|, underflow, saturation, signal, noise, nonfinite.

The maximum is over finite values. Underflow counts nonzero values that became 0. Saturation counts values
more than half a step beyond the largest code. Signal and noise sum x^2 and (x - q)^2 over finite values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Table
from ..operand import Operand
from . import reference, triton
from .reference import StatisticsRequest

__all__ = ["FIELDS", "TABLE", "StatisticsRequest", "take_in_statistics"]

# Equal to the kernel's values (`common.kernels.statistics`), whose module imports triton.
FIELDS = ("maximum", "underflow", "saturation", "signal", "noise", "nonfinite")

TABLE: Table[StatisticsRequest] = Table(
    "statistics", (triton.BACKEND, reference.BACKEND), describe=StatisticsRequest
)


def take_in_statistics(x: Tensor, operand: Operand | None, accumulated: Tensor) -> None:
    """Update the statistics in place: the maximum and the sums. Nothing is read on the host.

    Args:
        x: Matrix [M, K].
        operand: x quantized, in the same row order; None: not quantized, three statistics are 0.
        accumulated: float64 [6].
    """
    facts = (x.shape, x.stride(), x.dtype, x.device)
    if operand is None or operand.format is None:
        TABLE.bound(facts)(x, None, accumulated)
        return
    scale = operand.scale
    strides = () if scale is None or operand.format.block is None else scale.stride()
    TABLE.bound((*facts, operand.format, operand.codes.dtype, operand.codes.stride(), strides))(
        x, operand, accumulated
    )


def new_row(device: torch.device) -> Tensor:
    """Return the initial statistics."""
    return torch.zeros(len(FIELDS), dtype=torch.float64, device=device)

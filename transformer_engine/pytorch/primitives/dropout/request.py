"""What a dropout is told before a backend says yes or no, and the two numbers that its probability becomes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_UNIT = 1 << 16


class DropoutRequest(NamedTuple):
    """One call on a tensor, of the share of elements that are dropped."""

    operation: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    p: float = 0.0


def threshold_of(p: float) -> int:
    """The least of the numbers 0 .. 2^16 - 1 that keeps an element: p * 2^16, within 8e-6 of p."""
    return round(p * _UNIT)


def factor_of(p: float) -> float:
    """What a kept element is multiplied by, 1 / (1 - p); none is kept at p = 1."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def empty_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Room for (y, mask)."""
    return x.new_empty(x.shape), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)

"""What a dropout is told before a backend says yes or no, and the two numbers that its probability becomes."""

from __future__ import annotations

from typing import NamedTuple

import torch

_UNIT = 1 << 16


class DropoutRequest(NamedTuple):
    """One call on a tensor of `size` elements."""

    operation: str
    size: int
    dtype: torch.dtype
    device: torch.device


def threshold_of(p: float) -> int:
    """The least of the numbers 0 .. 2^16 - 1 that keeps an element: p * 2^16, within 8e-6 of p."""
    return round(p * _UNIT)


def factor_of(p: float) -> float:
    """What a kept element is multiplied by, 1 / (1 - p); none is kept at p = 1."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0

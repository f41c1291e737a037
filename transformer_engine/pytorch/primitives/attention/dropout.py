"""kept [b, h, i, j] = hash(seed, offset, index) >= p: dropout determined by two numbers, for exact replay."""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64 constants: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators (2014).
_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def random_state(device: torch.device) -> Tensor:
    """Draw (seed, offset) int64 [2], >= 0, on the device from its generator, so that forks and graphs replay them."""
    return torch.randint(0, 1 << 31, (2,), dtype=torch.int64, device=device)


def kept(state: Tensor, shape: torch.Size, probability: float) -> Tensor:
    """Return a bool tensor with this shape, each False with this probability; equal for equal states."""
    size = 1
    for extent in shape:
        size *= extent
    index = torch.arange(1, size + 1, dtype=torch.int64, device=state.device)
    x = (state[0] << 31) + state[1] + index * _INCREMENT
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    x = x ^ _shift_right(x, 31)
    return (_shift_right(x, 40) >= int(probability * (1 << 24))).reshape(shape)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return x >> bits, filled with zeros instead of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

"""y = (x * signs) @ H / 4 on groups of 16, H the 16 x 16 Hadamard matrix of Sylvester's construction."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16


_NEGATIVE = 0b1101_0111_1110_1000  # bit i: element i of a group changes its sign


def _signs(device: torch.device) -> Tensor:
    """float32 [16]; computed, not copied from the host, which a graph under capture refuses."""
    bits = torch.arange(GROUP, dtype=torch.int32, device=device)
    return (1 - 2 * ((_NEGATIVE >> bits) & 1)).to(torch.float32)


def hadamard_transform(x: Tensor, random_sign: bool = True) -> Tensor:
    """y [..., 16 n]: every 16 elements of the last axis transformed in float32, then rounded to x's dtype.

    Four rounds of sums and differences instead of a product: the order of additions, and so the bits, are the
    same on every device.
    """
    depth = x.shape[-1]
    if depth % GROUP:
        raise ValueError(
            f"the Hadamard transform takes groups of {GROUP}, {depth} elements are not a multiple; pad them"
        )
    groups = x.to(torch.float32).reshape(-1, GROUP)
    if random_sign:
        groups = groups * _signs(x.device)
    for distance in (1, 2, 4, 8):
        first, second = groups.view(-1, GROUP // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack((first + second, first - second), dim=2).view(-1, GROUP)
    return (groups * 0.25).view(x.shape).to(x.dtype)

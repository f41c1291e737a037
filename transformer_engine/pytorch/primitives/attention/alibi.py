"""slopes[i] = 2^(-8 (i + 1) / h): how fast ALiBi's penalty on distance grows, head by head."""

from __future__ import annotations

import torch
from torch import Tensor


def default_slopes(heads: int, device: torch.device) -> Tensor:
    """Slopes [heads] float32 of Press et al., Train Short, Test Long (2022).

    For h a power of two 2^(-8/h), 2^(-16/h), ...; for other h those of the next lower power n, then every
    second one of the 2n sequence.
    """
    power = 1 << (heads.bit_length() - 1)
    place = torch.arange(heads, device=device, dtype=torch.float32)
    exponent = torch.where(place < power, 8.0 * (place + 1.0), 4.0 * (2.0 * (place - power) + 1.0))
    return torch.exp2(-exponent / power)

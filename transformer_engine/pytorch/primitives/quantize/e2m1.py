"""E2M1: the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign, in four bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import E2M1


def encode_e2m1(x: Tensor, random: Tensor | None = None) -> Tensor:
    """codes uint8 of float32 x: the nearest, ties to the even code, beyond 6 the code of 6, NaN as +6.

    With random (uniform in [0, 1), shape of x): floor(|x| + random * gap) on the grid, gap being the distance
    between the two magnitudes that enclose |x|.
    """
    x = x.nan_to_num(nan=E2M1.maximum, posinf=E2M1.maximum, neginf=-E2M1.maximum)
    magnitude = x.abs()
    # The grid has gaps of 1/2 up to 2, of 1 up to 4 and of 2 up to 6: three stretches of 4, 2 and 1 codes. A
    # code is the sum of what |x| fills of the three, in units of their gaps. Every term is exact in float32.
    # torch.where() instead costs 10 ms a call for 2048 x 2048 on one core, each of these about 0.6 ms.
    stretches = (
        magnitude.clamp(max=2.0) * 2.0,
        magnitude.clamp(2.0, 4.0) - 2.0,
        (magnitude.clamp(4.0, 6.0) - 4.0) * 0.5,
    )
    if random is None:
        first, second, third = (stretch.round() for stretch in stretches)
        codes = first + second + third
    else:
        first, second, third = (stretch.floor() for stretch in stretches)
        whole = first + second + third
        # At most one stretch is partly filled.
        fraction = (stretches[0] - first) + (stretches[1] - second) + (stretches[2] - third)
        codes = whole + (fraction + random).floor()
    return codes.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes 0..15, the sign in bit 3."""
    # Computed, not copied from the host, which a graph under capture refuses.
    every = torch.arange(16, dtype=torch.float32, device=codes.device)
    place = every % 8.0
    magnitudes = (
        place.clamp(max=4.0) * 0.5 + (place.clamp(4.0, 6.0) - 4.0) + (place.clamp(min=6.0) - 6.0) * 2.0
    )
    table = torch.where(every < 8.0, magnitudes, -magnitudes)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] -> bytes [..., K / 2]; the even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"K={codes.shape[-1]} codes do not fill whole bytes; pad K to a multiple of 2")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """bytes [..., K / 2] -> uint8 codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)

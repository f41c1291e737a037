"""E8M0: a power of two 2^(e - 127) in one byte, the scale of OCP Microscaling Formats (MX) 1.0."""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0xFF
LARGEST = 0xFE
# float32 bits of 2^-127, the least scale: as a subnormal it is the leading mantissa bit.
_HALF_LEAST_NORMAL = 0x00400000
_QUIET_NAN = 0x7FC00000


def e8m0_from_float(v: Tensor) -> Tensor:
    """The least exponent byte e with 2^(e - 127) >= v, for float32 v >= 0; NaN -> 255, above 2^127 -> 254."""
    bits = v.view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    above = torch.where(exponent == 0, mantissa > _HALF_LEAST_NORMAL, mantissa != 0)
    rounded = (exponent + above.to(torch.int32)).clamp(max=LARGEST)
    return torch.where(bits > 0x7F800000, _NAN, rounded).to(torch.uint8)


def e8m0_to_float(codes: Tensor) -> Tensor:
    """2^(e - 127) as float32, exactly (2^-127 is subnormal); 255 -> NaN."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, _HALF_LEAST_NORMAL, exponent << 23)
    return torch.where(exponent == _NAN, _QUIET_NAN, bits).view(torch.float32)

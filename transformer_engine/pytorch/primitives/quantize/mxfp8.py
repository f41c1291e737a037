"""codes [R, K] = saturate(x * 2^(127 - e)), e = one byte for 32 elements.

OCP Microscaling Formats (MX) 1.0, with the exponent rounded up so that no element saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import tiles
from .float8 import cast
from .spec import QuantizeSpec

_NAN = 0xFF
_LARGEST = 0xFE
# float32 bits of 2^-127, the least scale: as a subnormal it is the leading mantissa bit.
_HALF_LEAST_NORMAL = 0x00400000
_QUIET_NAN = 0x7FC00000


def e8m0_from_float(v: Tensor) -> Tensor:
    """The least exponent byte e with 2^(e - 127) >= v, for float32 v >= 0; NaN -> 255, above 2^127 -> 254."""
    bits = v.view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    above = torch.where(exponent == 0, mantissa > _HALF_LEAST_NORMAL, mantissa != 0)
    rounded = (exponent + above.to(torch.int32)).clamp(max=_LARGEST)
    return torch.where(bits > 0x7F800000, _NAN, rounded).to(torch.uint8)


def e8m0_to_float(codes: Tensor) -> Tensor:
    """2^(e - 127) as float32, exactly (2^-127 is subnormal); 255 -> NaN."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, _HALF_LEAST_NORMAL, exponent << 23)
    return torch.where(exponent == _NAN, _QUIET_NAN, bits).view(torch.float32)


def encode(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """x [R, K] -> codes [R, K], exponents uint8 [ceil(R/r), ceil(K/32)], one a tile of r x 32."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    exponents = e8m0_from_float(tiles.tile_amax(cut) * (1.0 / spec.element.maximum))
    # 1 / 2^(e - 127) = 2^((254 - e) - 127); in a byte 254 - 255 is 255, so NaN stays NaN.
    multiplier = e8m0_to_float(_LARGEST - exponents)
    codes = cast(cut * tiles.spread(multiplier), spec.element)
    return tiles.join(codes, (x.shape[0], x.shape[1])), exponents

"""codes [R, K] = e2m1(x / (s * g)): s an E4M3 scale for 16 elements, g one float32 scale for the matrix.

Two-level scaling of "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import E2M1, E4M3, float32_max
from . import tiles
from .e2m1 import encode_e2m1
from .float8 import cast, divide
from .spec import QuantizeSpec


def _range() -> float:
    return E2M1.maximum * E4M3.maximum


def global_encode_scale(amax: Tensor) -> Tensor:
    """S = 6 * 448 / amax, at most FLOAT32_MAX; 1 where amax or S is 0."""
    scale = divide(_range(), amax).clamp(max=float32_max())
    return torch.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


def global_decode_scale(amax: Tensor) -> Tensor:
    """g = amax / (6 * 448): a value is code * block scale * g."""
    return torch.div(amax, torch.full_like(amax, _range()))


def encode(x: Tensor, spec: QuantizeSpec, amax: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [R, K], amax [1] -> unpacked codes uint8 [R, K], block scales e4m3 [ceil(R/r), ceil(K/16)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    encode_scale = global_encode_scale(amax)
    wanted = tiles.tile_amax(cut) * (encode_scale * (1.0 / E2M1.maximum))
    block_scale = cast(wanted.clamp(max=float32_max()), E4M3)
    multiplier = (block_scale.to(torch.float32) * encode_scale.reciprocal()).reciprocal()
    multiplier = multiplier.clamp(max=float32_max())
    random_tiles = None if random is None else tiles.cut(random, spec.tile)
    codes = encode_e2m1(cut * tiles.spread(multiplier), random_tiles)
    return tiles.join(codes, (x.shape[0], x.shape[1])), block_scale

"""codes [R, K] = saturate(x * scale of its tile), tiles of 1 x 128 or 128 x 128, scales in float32.

The scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import float32_max
from . import tiles
from .float8 import cast, scale_from_amax
from .spec import QuantizeSpec


def encode(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """x [R, K] -> codes [R, K], decode scales float32 [ceil(R/r), ceil(K/128)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile)
    scale = scale_from_amax(
        tiles.tile_amax(cut),
        spec.element.maximum,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        value_for_inf=min(torch.finfo(x.dtype).max, float32_max()),
    )
    codes = cast(cut * tiles.spread(scale), spec.element)
    return tiles.join(codes, (x.shape[0], x.shape[1])), scale.reciprocal()

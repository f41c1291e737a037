"""codes [R, K] = saturate(x * 2^(127 - e)), e = one byte for 32 elements.

OCP Microscaling Formats (MX) 1.0, with the exponent rounded up so that no element saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.formats import MXFP8, TILED_FORMATS
from .....common.kernels.launch import Launch
from .. import tiles
from ..encodings import LARGEST, cast, e8m0_from_float, e8m0_to_float
from ..spec import QuantizeSpec
from ..tile_scaled import tile_scaled


def encode(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """Encode x [R, K] to codes [R, K] and exponents uint8 [ceil(R/r), ceil(K/32)], one per r x 32 tile."""
    assert spec.tile is not None
    blocks = tiles.cut(x, spec.tile)
    exponents = e8m0_from_float(tiles.tile_amax(blocks) * (1.0 / spec.element.maximum))
    # 1 / 2^(e - 127) = 2^((254 - e) - 127); in a byte 254 - 255 is 255, so NaN stays NaN.
    multiplier = e8m0_to_float(LARGEST - exponents)
    codes = cast(blocks * tiles.spread(multiplier), spec.element)
    return tiles.join(codes, (x.shape[0], x.shape[1])), exponents


def _launch(
    spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Launch:
    from .....common.kernels import mxfp8

    options = {"square": spec.two_dimensional, "tiled": spec.tiled}
    return mxfp8.blocks(shape, spec.element, spec.rowwise, spec.columnwise, **options)


def _matrices(spec: QuantizeSpec, shape: tuple[int, int], count: int) -> Launch:
    from .....common.kernels import mxfp8

    directions = spec.rowwise, spec.columnwise
    return mxfp8.matrices(shape, count, spec.element, *directions, square=spec.two_dimensional)


FORMAT_ROWS = (
    tile_scaled(MXFP8, encode, decoded=e8m0_to_float, launch=_launch, matrices=_matrices),
    tile_scaled(TILED_FORMATS[MXFP8], encode, decoded=e8m0_to_float),
)

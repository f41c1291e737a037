"""codes [R, K] = saturate(x * scale of its tile), tiles of 1 x 128 or 128 x 128, scales in float32.

The scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .....common.formats import BLOCK_1D, BLOCK_2D
from ... import exact
from .. import tiles
from ..float8 import cast, scale_from_amax, value_for_inf
from ..spec import QuantizeSpec
from ..tile_scaled import tile_scaled


def encode(x: Array, spec: QuantizeSpec, axis: int) -> tuple[Array, Array]:
    """x [*R, *K] -> codes [*R, *K], decode scales float32 [.., ceil(R/r), .., ceil(K/128)]."""
    assert spec.tile is not None
    cut = tiles.cut(x, spec.tile, axis)
    scale = scale_from_amax(
        tiles.tile_amax(cut, axis),
        spec.element.maximum,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        value_for_inf=value_for_inf(x.dtype),
    )
    scale, inverse = tiles.settled((scale, exact.reciprocal(scale)))
    codes = cast(cut.astype(jnp.float32) * tiles.spread(scale, axis), spec.element)
    return tiles.join(codes, x.shape, axis), inverse


ROWS = (
    tile_scaled(BLOCK_1D, encode, exact.scaled),
    tile_scaled(BLOCK_2D, encode, exact.scaled),
)

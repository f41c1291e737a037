"""codes [R, K] = saturate(x * scale of its tile), 1 x 128 or 128 x 128 tiles, scales in float32.

DeepSeek-V3's scheme (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.formats import (
    BLOCK_1D,
    BLOCK_1D_POWERS,
    BLOCK_2D,
    BLOCK_2D_POWERS,
    ceil_div,
    float32_max,
)
from .....common.kernels.launch import Launch, Machine
from ....runtime import launching
from ....runtime.device import current_hardware
from .. import tiles
from ..encodings import cast, scale_from_amax
from ..spec import QuantizeSpec
from ..tile_scaled import tile_scaled


def encode(x: Tensor, spec: QuantizeSpec) -> tuple[Tensor, Tensor]:
    """Encode x [R, K] to codes [R, K] and decode scales float32 [ceil(R/r), ceil(K/128)]."""
    assert spec.tile is not None
    blocks = tiles.cut(x, spec.tile)
    scale = scale_from_amax(
        tiles.tile_amax(blocks),
        spec.element.maximum,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        value_for_inf=min(torch.finfo(x.dtype).max, float32_max()),
    )
    codes = cast(blocks * tiles.spread(scale), spec.element)
    return tiles.join(codes, (x.shape[0], x.shape[1])), scale.reciprocal()


def _row_blocks(
    spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Launch:
    from .....common.kernels import block_cast

    return block_cast.row_blocks(
        shape,
        spec.element,
        spec.rowwise,
        spec.columnwise,
        machine=Machine(
            *launching.processors(device.index), dtype.itemsize, current_hardware().threads
        ),
        **_scales(spec, dtype),
    )


def _square_blocks(
    spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Launch:
    from .....common.kernels import block_cast

    return block_cast.square_blocks(
        shape, spec.element, spec.rowwise, spec.columnwise, **_scales(spec, dtype)
    )


def _scales(spec: QuantizeSpec, dtype: torch.dtype) -> dict[str, float]:
    return {
        "power_of_two": spec.power_of_two,
        "epsilon": spec.epsilon,
        "value_for_inf": min(torch.finfo(dtype).max, float32_max()),
    }


FORMAT_ROWS = (
    tile_scaled(
        BLOCK_1D,
        encode,
        launch=_row_blocks,
        # The kernel's scales [rows, ceil(depth / 128)] are column-major.
        empty_scale=lambda x, rows, depth: x.new_empty(
            (ceil_div(depth, 128), rows), dtype=torch.float32
        ).t(),
    ),
    tile_scaled(BLOCK_2D, encode, launch=_square_blocks),
    # Formats for operands only: specs have the option `power_of_two`.
    tile_scaled(BLOCK_1D_POWERS, encode),
    tile_scaled(BLOCK_2D_POWERS, encode),
)

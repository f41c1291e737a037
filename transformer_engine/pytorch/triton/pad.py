"""Block-scale layouts: padding to whole tiles, and the order in which block-scaled products read a tile.

Blackwell's tensor cores read scales in tiles of 128 x 4 whose element (i, j) is at 16 (i % 32) + 4 (i // 32)
+ j (PyTorch names this order SWIZZLE_32_4_4). Tensors of this package keep their scales row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.formats import round_up

__all__ = ["pad_columnwise_scale_inv", "swizzled_scales"]

_ROWS, _COLUMNS = 128, 4


def pad_columnwise_scale_inv(inp: Tensor) -> Tensor:
    """Pad column-wise MXFP8 scales with zeros to whole tiles.

    Args:
        inp: Scales uint8 [M / 32, K].

    Returns:
        Scales uint8, M / 32 rounded up to a multiple of 4 and K to a multiple of 128.

    Raises:
        ValueError: `inp` has another dtype or axis count.
    """
    if inp.dim() != 2 or inp.dtype != torch.uint8:
        raise ValueError(f"inp is {inp.dtype} {list(inp.shape)}; give uint8 scales [M / 32, K]")
    rows, columns = inp.shape
    padding = (0, round_up(columns, _ROWS) - columns, 0, round_up(rows, _COLUMNS) - rows)
    return torch.nn.functional.pad(inp, padding)


def swizzled_scales(scales: Tensor) -> Tensor:
    """Return scales [128 r, 4 c] in block-scaled product order, as a tensor with the same shape.

    Args:
        scales: One-byte scales, row by row; rows are the operand's, columns its blocks.

    Raises:
        ValueError: The scales do not fill whole tiles.
    """
    rows, columns = scales.shape
    if rows % _ROWS or columns % _COLUMNS:
        raise ValueError(
            f"scales are {list(scales.shape)}, which is not a multiple of ({_ROWS}, {_COLUMNS}); pad them"
        )
    tiles = scales.view(rows // _ROWS, 4, 32, columns // _COLUMNS, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)

"""The scale order that matrix instructions read: tiles of 128 x 4 bytes, which follow each other row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.formats import round_up
from ...common.kernels.launch import unavailable_reason
from ..runtime.device import current_hardware
from ..runtime.launching import run
from .operand import Operand

TILE = (128, 4)


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the swizzled shape for scales [rows, columns]."""
    return round_up(rows, TILE[0]), round_up(columns, TILE[1])


def swizzled(scale: Tensor) -> Tensor:
    """Swizzle one-byte scales [R, C]; the result is uint8, padded with zeros to multiples of 128 rows and 4 columns.

    Byte (r, c) in a 128 x 4 tile is at (r % 32) * 16 + r // 32 * 4 + c; the tiles follow each other row by row.
    """
    rows, columns = scale.shape
    scale = scale.view(torch.uint8)
    shape = swizzled_shape(rows, columns)
    if scale.is_cuda and unavailable_reason(current_hardware()) is None:
        from ...common.kernels.swizzled_scales import swizzle

        down, along = scale.stride()
        (result,) = run(swizzle(rows, columns, (down, along)), (scale,))
        assert result is not None
        return result.view(shape)
    scale = F.pad(scale, (0, shape[1] - columns, 0, shape[0] - rows))
    return (
        scale.view(shape[0] // 128, 4, 32, shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(shape)
    )


def check_tiles(*scales: Tensor | None) -> None:
    """Check that scales fill whole tiles.

    Raises:
        ValueError: They do not.
    """
    for scale in scales:
        if scale is not None and (scale.shape[0] % TILE[0] or scale.shape[1] % TILE[1]):
            raise ValueError(
                f"swizzled scales have the shape {tuple(scale.shape)}, which is not a multiple of {TILE}; pad them"
            )


def compact(scale: Tensor) -> Tensor:
    """Return scales [128 r, 4 c] row by row, the reverse of `swizzled`.

    Raises:
        ValueError: The scales do not fill whole tiles.
    """
    check_tiles(scale)
    rows, columns = scale.shape
    tiles = scale.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def row_major(operand: Operand) -> Operand:
    """Return an operand whose scales are in rows; the operand itself where they are."""
    form, scale = operand.format, operand.scale
    if (
        form is None
        or form.general is None
        or not form.in_tiles
        or scale is None
        or form.block is None
    ):
        return operand
    columns = -(-operand.depth // form.block[1])
    rows = compact(scale.view(torch.uint8))[: operand.rows, :columns].contiguous()
    return operand._replace(scale=rows.view(scale.dtype), format=form.general)

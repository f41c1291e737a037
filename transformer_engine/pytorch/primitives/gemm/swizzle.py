"""Scales in the order that matrix instructions read: tiles of 128 x 4 bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.formats import MXFP8, ceil_div, round_up
from ...runtime.launching import run
from ..operand import Operand

_TILE = (128, 4)


def swizzled(scale: Tensor) -> Tensor:
    """Swizzle one-byte scales [R, C]; the result is uint8, padded with zeros to multiples of 128 rows and 4 columns.

    Byte (r, c) of a tile of 128 x 4 is at (r % 32) * 16 + r // 32 * 4 + c; the tiles follow each other row by row.
    """
    rows, columns = scale.shape
    scale = scale.view(torch.uint8)
    shape = round_up(rows, _TILE[0]), round_up(columns, _TILE[1])
    if scale.is_cuda:
        from ....common.kernels.swizzled_scales import swizzle  # it imports triton

        down, along = scale.stride()
        (result,) = run(swizzle(rows, columns, (down, along)), (scale,))
        assert result is not None
        return result.view(shape)
    scale = F.pad(scale, (0, shape[1] - columns, 0, shape[0] - rows))
    return scale.view(shape[0] // 128, 4, 32, shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(shape)


def compact(scale: Tensor) -> Tensor:
    """Return scales [128 r, 4 c] row by row, the reverse of `swizzled`.

    Raises:
        ValueError: The scales do not fill whole tiles.
    """
    rows, columns = scale.shape
    if rows % _TILE[0] or columns % _TILE[1]:
        raise ValueError(
            f"swizzled scales have the shape {(rows, columns)}, which is not a multiple of {_TILE}; pad them"
        )
    tiles = scale.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def swizzled_scale(operand: Operand) -> Tensor:
    """Scales of an operand in swizzled order, one byte each.

    Float32 scales of 128-element blocks, powers of two, become the exponents of 32 elements of every row.
    """
    scale, form = operand.scale, operand.format
    assert scale is not None and form is not None and form.block is not None and MXFP8.block is not None
    if form.scale != "float32":
        return swizzled(scale)
    rows, columns = operand.rows, ceil_div(operand.depth, MXFP8.block[1])
    if scale.is_cuda:
        from ....common.kernels.swizzled_scales import swizzle_exponents  # it imports triton

        down, along = scale.stride()
        (result,) = run(swizzle_exponents(rows, columns, (down, along), form.block[0]), (scale,))
        assert result is not None
        return result.view(round_up(rows, _TILE[0]), round_up(columns, _TILE[1]))
    exponents = (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    exponents = exponents.repeat_interleave(form.block[0], 0)[:rows]
    return swizzled(exponents.repeat_interleave(form.block[1] // MXFP8.block[1], 1)[:, :columns])


def second_level(operand: Operand) -> Tensor | None:
    """Return the second-level scale of an operand, float32 [1], or [rows] with one per row; None without one."""
    unit = None if operand.format is None else operand.format.unit_amax
    if unit is None:
        return None
    assert operand.amax is not None
    return operand.amax / unit

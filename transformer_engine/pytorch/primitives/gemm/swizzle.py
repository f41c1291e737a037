"""Scales in the order that matrix instructions read: tiles of 128 x 4 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import EXPONENTS, ceil_div, round_up
from ....common.kernels.launch import unavailable_reason
from ...runtime.device import current_hardware
from ...runtime.launching import run
from ..operand import Operand
from ..scale_order import TILE, swizzled


def swizzle_operand_scale(operand: Operand) -> Tensor:
    """Scales of an operand in swizzled order, one byte each.

    Power-of-two float32 scales of 128-element blocks become exponents for 32 elements in every row.
    """
    scale, form = operand.scale, operand.format
    assert scale is not None and form is not None and form.block is not None
    if form.in_tiles:
        return scale.view(torch.uint8)
    if form.swizzled:
        return swizzled(scale)
    rows, columns = operand.rows, ceil_div(operand.depth, EXPONENTS.length)
    if scale.is_cuda and unavailable_reason(current_hardware()) is None:
        from ....common.kernels.swizzled_scales import swizzle_exponents

        down, along = scale.stride()
        (result,) = run(swizzle_exponents(rows, columns, (down, along), form.block[0]), (scale,))
        assert result is not None
        return result.view(round_up(rows, TILE[0]), round_up(columns, TILE[1]))
    exponents = (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    exponents = exponents.repeat_interleave(form.block[0], 0)[:rows]
    return swizzled(exponents.repeat_interleave(form.length // EXPONENTS.length, 1)[:, :columns])


def second_level(operand: Operand) -> Tensor | None:
    """Return the second-level scale of an operand, float32 [1], or [rows] with one per row; None without one."""
    unit = None if operand.format is None else operand.format.unit_amax
    if unit is None:
        return None
    assert operand.amax is not None
    return operand.amax / unit

"""Scales of 1x128 and 128x128 blocks in the layout that cuBLASLt reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.formats import BLOCK_1D, round_up
from ..operand import Operand

BLOCK = 128
LINE = 4  # blocks of K that a line of 128x128 scales is a multiple of

SCALE_ALIGNMENT = 16  # bytes; cuBLASLt reads the scale of a tensor at multiples of it


def block_scale(operand: Operand, codes: Tensor) -> Tensor:
    """Scales in cuBLASLt's layout: 1x128 [rows, K/128] rows contiguous; 128x128 [K/128, rows/128] K contiguous,
    padded to a multiple of 4 blocks of K. codes are the operand's, padded by rows or columns of zeros perhaps."""
    scale = block_scale_memory(operand, codes)
    return scale if operand.format == BLOCK_1D else scale.t()


def block_scale_memory(operand: Operand, codes: Tensor) -> Tensor:
    """The same numbers in the same memory, of 128x128 blocks as [rows/128, K/128]: for who reads addresses alone."""
    scale = operand.scale
    assert scale is not None
    rows, depth = codes.shape
    if operand.format is BLOCK_1D or operand.format == BLOCK_1D:
        if scale.shape[0] != rows:
            scale = _padded(scale, rows - scale.shape[0], 0)
        return scale if scale.stride() == (1, rows) else _column_major(scale)
    blocks = depth // BLOCK
    if blocks % LINE:
        scale = _padded(scale, 0, round_up(blocks, LINE) - blocks)
    return scale if scale.is_contiguous() else scale.clone(memory_format=torch.contiguous_format)


def _padded(scale: Tensor, rows: int, columns: int) -> Tensor:
    """More blocks, of zero codes, whose scale does not matter as long as it is finite."""
    return F.pad(scale, (0, columns, 0, rows), value=1.0)


def _column_major(scale: Tensor) -> Tensor:
    """The same matrix with strides (1, rows); contiguous() would keep other strides where a size is 1."""
    return scale.t().clone(memory_format=torch.contiguous_format).t()


def aligned_scale(scale: Tensor) -> Tensor:
    """The one scale of a tensor at a multiple of 16 bytes, as cuBLASLt has to have it.

    A copy where it lies elsewhere, as those of a stack's members do, which lie side by side. A compiler that traces
    knows no addresses; members of a stack then have copies, see `GroupedTensorStorage`.
    """
    if torch.compiler.is_compiling():
        return scale
    return scale.clone() if scale.data_ptr() % SCALE_ALIGNMENT else scale

"""1x128 and 128x128 block scales in the layout that cuBLASLt reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.formats import BLOCK_1D, TensorFormat, round_up
from ..operand import Operand

BLOCK = 128
LINE = 4  # a line of 128x128 scales is padded to a multiple of this many K blocks

SCALE_ALIGNMENT = 16  # bytes; cuBLASLt reads the scale of a tensor at multiples of it


def block_scale(operand: Operand, codes: Tensor) -> Tensor:
    """Return the scales of an operand in cuBLASLt's layout; codes are the operand's, possibly padded with zeros.

    1x128 blocks: [rows, K/128], rows contiguous; 128x128 blocks: [K/128, rows/128], K contiguous,
    padded to a multiple of 4 K blocks.
    """
    scale = block_scale_memory(operand, codes.shape)
    return scale if has_row_blocks(operand.format) else scale.t()


def has_row_blocks(form: TensorFormat | None) -> bool:
    """Return whether blocks of a format lie in one row, 1x128 elements."""
    return form is BLOCK_1D or (form is not None and form.block == BLOCK_1D.block)


def block_scale_memory(operand: Operand, shape: Sequence[int]) -> Tensor:
    """Return the memory of `block_scale`, [rows/128, K/128] for 128x128 blocks, for callers that read addresses.

    Args:
        operand: The operand, of which only scale and format are read.
        shape: Shape [rows, K] of its codes, possibly padded with zeros.
    """
    scale = operand.scale
    assert scale is not None
    rows, depth = shape
    if has_row_blocks(operand.format):
        if scale.shape[0] != rows:
            # Padding codes are zero: any finite scale will do.
            scale = F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)
        if scale.stride() == (1, rows):
            return scale
        # Not contiguous(), which keeps other strides where a size is 1.
        return scale.t().clone(memory_format=torch.contiguous_format).t()
    blocks = depth // BLOCK
    if blocks % LINE:
        scale = F.pad(scale, (0, round_up(blocks, LINE) - blocks, 0, 0), value=1.0)
    return scale if scale.is_contiguous() else scale.clone(memory_format=torch.contiguous_format)


def align_scale(scale: Tensor) -> Tensor:
    """Return the scale of a tensor at a multiple of 16 bytes, as cuBLASLt requires.

    A stack's member scales are adjacent, so they have other addresses and are copied here. Addresses are
    unknown while torch.compile traces; stack members then have copies, see `GroupedTensorStorage`.
    """
    if torch.compiler.is_compiling():
        return scale
    return scale.clone() if scale.data_ptr() % SCALE_ALIGNMENT else scale

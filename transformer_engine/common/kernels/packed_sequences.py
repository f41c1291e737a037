"""Set x [t, width] to 0 in tokens outside all sequences: after the last packed sequence, or by a mask."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch


@triton.jit
def zero_padding_kernel(
    x, starts, tokens, width, sequences, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Clear x [tokens, width] in place; starts int32 [sequences + 1]."""
    first = tl.load(starts + sequences)
    begin = tl.program_id(0) * ROWS
    if begin + ROWS > first:
        row = begin + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        clears = (row >= first) & (row < tokens)
        for offset in range(0, width, COLUMNS):
            inside = clears[:, None] & (offset + column < width)[None, :]
            offsets = row.to(tl.int64)[:, None] * width + (offset + column)[None, :]
            tl.store(
                x + offsets,
                tl.zeros([ROWS, COLUMNS], tl.float32).to(x.dtype.element_ty),
                mask=inside,
            )


def zero_padding_launch(tokens: int, width: int, sequences: int) -> Launch:
    """Launch (x [tokens, width], starts int32 [sequences + 1]) that writes x."""
    rows, columns = 64, 128
    return Launch(
        zero_padding_kernel,
        (ceil_div(tokens, rows), 1, 1),
        (),
        (tokens, width, sequences),
        (rows, columns),
        warps=4,
        in_place=(0,),
    )


@triton.jit
def zero_unseen_kernel(x, seen, tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Clear x [tokens, width] in place where seen [tokens] is 0; x is not read."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    clears = tl.load(seen + row, mask=row < tokens, other=1) == 0
    if tl.max(clears.to(tl.int32), 0) > 0:
        column = tl.arange(0, COLUMNS)
        for offset in range(0, width, COLUMNS):
            inside = clears[:, None] & (offset + column < width)[None, :]
            offsets = row.to(tl.int64)[:, None] * width + (offset + column)[None, :]
            tl.store(
                x + offsets,
                tl.zeros([ROWS, COLUMNS], tl.float32).to(x.dtype.element_ty),
                mask=inside,
            )


def zero_unseen(tokens: int, width: int) -> Launch:
    """Launch (x [tokens, width], seen uint8 [tokens]) that writes x."""
    rows, columns = 16, 256
    grid = (ceil_div(tokens, rows), 1, 1)
    return Launch(
        zero_unseen_kernel, grid, (), (tokens, width), (rows, columns), warps=4, in_place=(0,)
    )

"""One step of delayed scaling for many states in one launch, reached through a table of their addresses."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, ceil_div
from .launch import NUMBER, WRITTEN, Launch, Table

_LARGEST = tl.constexpr(FLOAT32_MAX)
LIMIT = 1 << 15  # elements of a history that one program holds in registers: whole columns


@triton.jit
def _advance(
    table_ptr,
    LENGTH: tl.constexpr,
    TAKES_MAXIMUM: tl.constexpr,
    KEEPS_IDLE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Row i of the table: addresses of a history float32 [LENGTH, n] and a scale float32 [n], and n."""
    entry = table_ptr + 3 * tl.program_id(0)
    history_ptr = tl.load(entry).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    columns = tl.load(entry + 2).to(tl.int32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    present = column < columns
    inside = (row < LENGTH) & present[None, :]

    # What moves up into each row: the next one, and row 0 into the last. Together they are the whole history.
    source = tl.where(row == LENGTH - 1, 0, row + 1)
    history = tl.load(history_ptr + source * columns + column[None, :], mask=inside, other=0.0)
    latest = tl.load(history_ptr + column, mask=present, other=0.0)
    old_scale = tl.load(scale_ptr + column, mask=present, other=1.0)

    if TAKES_MAXIMUM:
        amax = tl.max(tl.where(inside, history, float("-inf")), axis=0)
        usable = tl.max((history != history).to(tl.int32), axis=0) == 0  # tl.max drops NaN
    else:
        amax = latest
        usable = latest == latest
    scale = tl.div_rn(tl.div_rn(FP8_MAX, amax), DIVISOR)
    scale = tl.where(scale == float("inf"), _LARGEST, scale)
    scale = tl.where(usable & (amax > 0.0) & (amax < float("inf")), scale, old_scale)

    moved = present
    if KEEPS_IDLE:
        moved = present & (latest != 0.0)
    tl.debug_barrier()  # every row has been read before one is written
    tl.store(
        history_ptr + row * columns + column[None, :],
        tl.where(row == 0, 0.0, history),
        mask=inside & moved[None, :],
    )
    tl.store(scale_ptr + column, scale, mask=moved)


def advance(
    states: int, length: int, columns: int, takes_maximum: bool, keeps_idle: bool, fp8_max: float, margin: int
) -> Launch:
    """table int64 [states, 3] -> nothing: histories and scales are updated where they are.

    columns   the largest n of the states
    """
    rows = triton.next_power_of_2(length)
    block = min(triton.next_power_of_2(columns), max(LIMIT // rows, 1))
    return Launch(
        _advance,
        grid=(states, ceil_div(columns, block), 1),
        outputs=(),
        scalars=(),
        constants=(
            length,
            takes_maximum,
            keeps_idle,
            float(fp8_max),
            float(2**margin),
            rows,
            block,
        ),
        warps=8 if length * block > 1024 else 1,
        tables=(Table(0, (WRITTEN, WRITTEN, NUMBER)),),
    )

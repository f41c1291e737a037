"""One delayed-scaling step for many states in one launch, through a table of their addresses or as arguments."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, ceil_div
from .launch import NUMBER, WRITTEN, AddressTable, Launch, Output
from .rounding import take_multiplier

_LARGEST = tl.constexpr(FLOAT32_MAX)
LIMIT = 1 << 15  # history elements that one program holds in registers, in full columns


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
    """Advance the state in row i of the table: the address of a history float32 [LENGTH, n], a scale's address, n."""
    entry = table_ptr + 3 * tl.program_id(0)
    history_ptr = tl.load(entry).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    columns = tl.load(entry + 2).to(tl.int32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    present = column < columns
    inside = (row < LENGTH) & present[None, :]

    # Row r receives row r + 1, and the last row receives row 0: together they are the whole history.
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
    tl.debug_barrier()  # all rows are read before the first one is written
    tl.store(
        history_ptr + row * columns + column[None, :],
        tl.where(row == 0, 0.0, history),
        mask=inside & moved[None, :],
    )
    tl.store(scale_ptr + column, scale, mask=moved)


def advance(
    states: int,
    length: int,
    columns: int,
    takes_maximum: bool,
    keeps_idle: bool,
    fp8_max: float,
    margin: float,
) -> Launch:
    """Launch (table int64 [states, 3]) that updates histories and scales in place.

    Args:
        states: Number of states.
        length: Number of steps in a history.
        columns: Largest n among the states.
        takes_maximum: Compute the scale from the history's maximum instead of the latest amax.
        keeps_idle: Columns whose latest amax is 0 keep scale and history.
        fp8_max: Largest finite value of the FP8 type.
        margin: Exponent in the scale's divisor 2^margin.
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
            float(2.0**margin),
            rows,
            block,
        ),
        warps=8 if length * block > 1024 else 1,
        tables=(AddressTable(0, (WRITTEN, WRITTEN, NUMBER)),),
    )


@triton.jit
def _step(
    history,
    scale,
    amax,
    new_history,
    new_scale,
    LENGTH: tl.constexpr,
    TAKES_MAXIMUM: tl.constexpr,
    FP8_MAX: tl.constexpr,
    DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Advance one state: append amax [1] to history [LENGTH] and compute the new scale [1]."""
    row = tl.arange(0, ROWS)
    latest = tl.load(amax)
    shifted = tl.load(history + row + 1, mask=row < LENGTH - 1, other=0.0)
    shifted = tl.where(row == LENGTH - 1, latest, shifted)
    # Non-negative floats compare like their bits, and NaN has the largest bits.
    bits = latest.to(tl.int32, bitcast=True)
    if TAKES_MAXIMUM:
        bits = tl.max(shifted.to(tl.int32, bitcast=True), 0)
    old_scale = take_multiplier(scale, True)
    computed = tl.div_rn(tl.div_rn(FP8_MAX, bits.to(tl.float32, bitcast=True)), DIVISOR)
    computed = tl.where(computed == float("inf"), _LARGEST, computed)
    computed = tl.where((bits > 0) & (bits < 0x7F800000), computed, old_scale)
    tl.store(new_history + row, tl.where(row == 0, 0.0, shifted), mask=row < LENGTH)
    tl.store(new_scale, computed)


@triton.jit
def advance_states(
    history_0,
    history_1,
    history_2,
    history_3,
    history_4,
    history_5,
    scale_0,
    scale_1,
    scale_2,
    scale_3,
    scale_4,
    scale_5,
    amax_0,
    amax_1,
    amax_2,
    amax_3,
    amax_4,
    amax_5,
    new_history_0,
    new_history_1,
    new_history_2,
    new_history_3,
    new_history_4,
    new_history_5,
    new_scale_0,
    new_scale_1,
    new_scale_2,
    new_scale_3,
    new_scale_4,
    new_scale_5,
    LENGTH: tl.constexpr,
    TAKES_MAXIMUM: tl.constexpr,
    MAX_0: tl.constexpr,
    MAX_1: tl.constexpr,
    MAX_2: tl.constexpr,
    MAX_3: tl.constexpr,
    MAX_4: tl.constexpr,
    MAX_5: tl.constexpr,
    DIVISOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Advance up to six states: one program per state and group. Histories are contiguous, [groups, LENGTH]."""
    state = tl.program_id(0)
    g = tl.program_id(1)
    row = g * LENGTH
    if state == 0:
        _step(
            history_0 + row,
            scale_0 + g,
            amax_0 + g,
            new_history_0 + row,
            new_scale_0 + g,
            LENGTH,
            TAKES_MAXIMUM,
            MAX_0,
            DIVISOR,
            ROWS,
        )
    elif state == 1:
        if history_1 is not None:
            _step(
                history_1 + row,
                scale_1 + g,
                amax_1 + g,
                new_history_1 + row,
                new_scale_1 + g,
                LENGTH,
                TAKES_MAXIMUM,
                MAX_1,
                DIVISOR,
                ROWS,
            )
    elif state == 2:
        if history_2 is not None:
            _step(
                history_2 + row,
                scale_2 + g,
                amax_2 + g,
                new_history_2 + row,
                new_scale_2 + g,
                LENGTH,
                TAKES_MAXIMUM,
                MAX_2,
                DIVISOR,
                ROWS,
            )
    elif state == 3:
        if history_3 is not None:
            _step(
                history_3 + row,
                scale_3 + g,
                amax_3 + g,
                new_history_3 + row,
                new_scale_3 + g,
                LENGTH,
                TAKES_MAXIMUM,
                MAX_3,
                DIVISOR,
                ROWS,
            )
    elif state == 4:
        if history_4 is not None:
            _step(
                history_4 + row,
                scale_4 + g,
                amax_4 + g,
                new_history_4 + row,
                new_scale_4 + g,
                LENGTH,
                TAKES_MAXIMUM,
                MAX_4,
                DIVISOR,
                ROWS,
            )
    else:
        if history_5 is not None:
            _step(
                history_5 + row,
                scale_5 + g,
                amax_5 + g,
                new_history_5 + row,
                new_scale_5 + g,
                LENGTH,
                TAKES_MAXIMUM,
                MAX_5,
                DIVISOR,
                ROWS,
            )


STATES = 6  # states that one launch of `advance_new` advances: both products in an MLP


def advance_new(
    length: int, takes_maximum: bool, maxima: tuple[float, ...], margin: float, groups: int = 1
) -> Launch:
    """Advance up to `STATES` states into new arrays.

    Inputs: STATES histories float32 [groups, length], STATES scales float32 [groups] and the STATES maxima float32
    [groups] of this step; None behind the last state. Outputs: STATES new histories and STATES new scales. The inputs
    are not written, so a framework with immutable arrays needs no copies. A zero scale is read as 1.

    Args:
        length: Number of steps in a history.
        takes_maximum: Compute the scale from the history's maximum instead of the latest amax.
        maxima: Largest finite value of each state's FP8 type, one per state.
        margin: Exponent in the scale's divisor 2^margin.
        groups: Number of scales per state.
    """
    states = len(maxima)
    filled = (*maxima, *[1.0] * (STATES - states))
    absent: list[Output | None] = [None] * (STATES - states)
    histories = [Output((groups, length) if groups > 1 else (length,), "float32") for _ in maxima]
    scales = [Output((groups,), "float32") for _ in maxima]
    return Launch(
        advance_states,
        grid=(states, groups, 1),
        outputs=(*histories, *absent, *scales, *absent),
        scalars=(),
        constants=(
            length,
            takes_maximum,
            *filled,
            float(2.0**margin),
            triton.next_power_of_2(length),
        ),
        warps=4 if length > 512 else 1,
    )

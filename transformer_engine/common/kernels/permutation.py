"""y[row of (t, j)] = x[t], and x[t] = sum over j of w[t, j] * y[row of (t, j)]: tokens [T, H] to experts and back.

Token t has routes j, one for each expert that processes it. Each route has a row in y and a column of probabilities.

* By mask: map int32 [T, 2 E + 1] with a token's rows, the highest first, at 0, their experts at E, and their number at
  2 E. A route's column is its expert; pad_offsets int64 [E] shift an expert's rows.
* By index: map int32 [J, T] with the row of token t's route j, -1 if it is dropped. A route's column is j.

Rows beyond y's last row are dropped too. Values that are only moved can have any dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output
from .program import Program, ProgramStep, step

_CLEARED = 32  # rows per clear_kernel program
_TOGETHER = 4  # rows that a collect_kernel program loads at once


@triton.jit
def _routes(map, token, columns, BY_MASK: tl.constexpr):
    """Number of routes for a token."""
    count = columns
    if BY_MASK:
        count = tl.load(map + token.to(tl.int64) * (2 * columns + 1) + 2 * columns)
    return count


@triton.jit
def _route(map, pad_offsets, token, j, tokens, columns, BY_MASK: tl.constexpr):
    """Get (row int64, column) of a token's route j."""
    if BY_MASK:
        start = map + token.to(tl.int64) * (2 * columns + 1) + j
        row = tl.load(start).to(tl.int64)
        column = tl.load(start + columns)
        if pad_offsets is not None:
            row += tl.load(pad_offsets + column)
    else:
        row = tl.load(map + tl.cast(j, tl.int64) * tokens + token).to(tl.int64)
        column = j
    return row, column


@triton.jit
def send_kernel(
    x,
    map,
    pad_offsets,
    probs,
    y,
    row_probs,
    taken,
    tokens,
    rows,
    hidden,
    columns,
    BY_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK values from a token to all its rows; with probs, a row with probability 0 becomes zero.

    taken [rows] is marked for every written row.
    """
    parts = tl.cdiv(hidden, BLOCK)
    token = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    feature = part * BLOCK + tl.arange(0, BLOCK)
    inside = feature < hidden
    values = tl.load(x + token.to(tl.int64) * hidden + feature, mask=inside, other=0)
    for j in range(_routes(map, token, columns, BY_MASK)):
        row, column = _route(map, pad_offsets, token, j, tokens, columns, BY_MASK)
        if (row >= 0) & (row < rows):
            sent = values
            if probs is not None:
                weight = tl.load(probs + token.to(tl.int64) * columns + column)
                sent = tl.where(weight == 0.0, tl.zeros_like(values), values)
                tl.store(row_probs + row, weight)
            tl.store(y + row * hidden + feature, sent, mask=inside, cache_modifier=".cs")
            if taken is not None:
                tl.store(taken + row, tl.full([], 1, tl.uint8))


@triton.jit
def clear_kernel(y, row_probs, taken, rows, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Set the rows without a token to zero."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    free = tl.load(taken + row, mask=row < rows, other=1) == 0
    if tl.max(free.to(tl.int32), 0) != 0:
        if row_probs is not None:
            tl.store(row_probs + row, tl.zeros([ROWS], row_probs.dtype.element_ty), mask=free)
        for first in range(0, hidden, BLOCK):
            feature = first + tl.arange(0, BLOCK)
            offsets = row.to(tl.int64)[:, None] * hidden + feature[None, :]
            nothing = tl.zeros([ROWS, BLOCK], y.dtype.element_ty)
            tl.store(y + offsets, nothing, mask=free[:, None] & (feature < hidden)[None, :])


@triton.jit
def collect_kernel(
    y,
    map,
    pad_offsets,
    weights,
    row_values,
    x,
    values,
    tokens,
    rows,
    hidden,
    columns,
    BY_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """x[t] = sum over routes of weight * y[row], from the lowest row on; values[t, column] = row_values[row].

    The rows for TOGETHER routes are loaded at once.
    """
    parts = tl.cdiv(hidden, BLOCK)
    token = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    feature = part * BLOCK + tl.arange(0, BLOCK)
    inside = feature < hidden
    lane = tl.arange(0, COLUMNS)
    total = tl.zeros([BLOCK], tl.float32)
    column_values = tl.zeros([COLUMNS], tl.float32)
    count = _routes(map, token, columns, BY_MASK)
    for i in range(0, count, TOGETHER):
        for k in tl.static_range(TOGETHER):
            j = count - 1 - i - k
            row, column = _route(
                map, pad_offsets, token, tl.maximum(j, 0), tokens, columns, BY_MASK
            )
            valid = (row >= 0) & (row < rows) & (j >= 0)
            value = tl.load(y + row * hidden + feature, mask=inside & valid, other=0.0).to(
                tl.float32
            )
            if weights is not None:
                offset = token.to(tl.int64) * columns + column
                value *= tl.load(weights + offset, mask=j >= 0, other=0.0).to(tl.float32)
            total += value
            if row_values is not None:
                one = tl.load(row_values + row, mask=valid, other=0.0).to(tl.float32)
                column_values = tl.where((lane == column) & (j >= 0), one, column_values)
    tl.store(x + token.to(tl.int64) * hidden + feature, total.to(x.dtype.element_ty), mask=inside)
    if row_values is not None:
        target = values + token.to(tl.int64) * columns + lane
        tl.store(
            target, column_values.to(values.dtype.element_ty), mask=(lane < columns) & (part == 0)
        )


@triton.jit
def send_weighted_kernel(
    dx,
    map,
    pad_offsets,
    weights,
    y,
    dy,
    grad_weights,
    taken,
    tokens,
    rows,
    hidden,
    columns,
    BY_MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dy[row] = weight * dx[t] and grad_weights[t, column] = sum(y[row] * dx[t]) for one token: collect's gradients.

    Without y, the weights need no gradient. With WHOLE, a row is one BLOCK.
    """
    token = tl.program_id(0)
    lane = tl.arange(0, COLUMNS)
    feature = tl.arange(0, BLOCK)
    source = dx + token.to(tl.int64) * hidden
    sums = tl.zeros([COLUMNS], tl.float32)
    if WHOLE:
        unweighted = tl.load(source + feature, mask=feature < hidden, other=0.0).to(tl.float32)
    for j in range(_routes(map, token, columns, BY_MASK)):
        row, column = _route(map, pad_offsets, token, j, tokens, columns, BY_MASK)
        if (row >= 0) & (row < rows):
            weight = tl.load(weights + token.to(tl.int64) * columns + column).to(tl.float32)
            products = tl.zeros([BLOCK], tl.float32)
            for first in range(0, hidden, BLOCK):
                inside = first + feature < hidden
                if WHOLE:
                    gradient = unweighted
                else:
                    gradient = tl.load(source + first + feature, mask=inside, other=0.0).to(
                        tl.float32
                    )
                offsets = row * hidden + first + feature
                if y is not None:
                    products += gradient * tl.load(y + offsets, mask=inside, other=0.0).to(
                        tl.float32
                    )
                weighted = (gradient * weight).to(dy.dtype.element_ty)
                tl.store(dy + offsets, weighted, mask=inside, cache_modifier=".cs")
            if y is not None:
                sums = tl.where(lane == column, tl.sum(products, 0), sums)
            tl.store(taken + row, tl.full([], 1, tl.uint8))
    if grad_weights is not None:
        target = grad_weights + token.to(tl.int64) * columns + lane
        tl.store(target, sums.to(grad_weights.dtype.element_ty), mask=lane < columns)


def send(
    shape: tuple[int, int],
    rows: int,
    columns: int,
    by_mask: bool,
    dtype: str,
    probs: str | None,
    every_row: bool,
) -> Program:
    """Program (x [T, H], map, pad_offsets | None, probs [T, columns] | None) -> y, row_probs [rows].

    Args:
        shape: (T, H).
        rows: Number of rows of y.
        columns: Number of columns.
        by_mask: Map layout.
        dtype: Dtype of x and y.
        probs: Probability dtype; None: no probabilities.
        every_row: Every row of y receives a token; otherwise rows without a token become zero.
    """
    tokens, hidden = shape
    block, warps = _tile(hidden)
    outputs = (
        Output((rows, hidden), dtype),
        None if probs is None else Output((rows,), probs),
        None if every_row else Output((rows,), "uint8", begins=0.0),
    )
    grid = (tokens * ceil_div(hidden, block), 1, 1)
    sending = Launch(
        send_kernel, grid, outputs, (tokens, rows, hidden, columns), (by_mask, block), warps
    )
    inputs = ("x", "map", "pad_offsets", "probs")
    steps = [step(sending, inputs, ("y", "row_probs", "taken"))]
    row_probs = None if probs is None else "row_probs"
    if not every_row:
        steps.append(_clearing(rows, hidden, "y", row_probs))
    return Program(inputs, tuple(steps), ("y", row_probs))


def collect(
    shape: tuple[int, int], rows: int, columns: int, by_mask: bool, dtype: str, values: str | None
) -> Launch:
    """Launch (y [rows, H], map, pad_offsets | None, weights | None, row_values [rows] | None) -> x, values.

    weights are [T, columns], x [T, H] has `dtype`, values [T, columns] dtype `values`; without row_values, None.
    """
    tokens, hidden = shape
    block, warps = _tile(hidden)
    outputs = (Output(shape, dtype), None if values is None else Output((tokens, columns), values))
    constants = (by_mask, block, triton.next_power_of_2(columns), min(columns, _TOGETHER))
    grid = (tokens * ceil_div(hidden, block), 1, 1)
    return Launch(collect_kernel, grid, outputs, (tokens, rows, hidden, columns), constants, warps)


def send_weighted(
    shape: tuple[int, int], rows: int, columns: int, by_mask: bool, dtypes: tuple[str, str | None]
) -> Program:
    """Program (dx [T, H], map, pad_offsets | None, weights [T, columns], y | None) -> dy, grad_weights.

    y and dy are [rows, H]. `dtypes` belong to dy and to the weights' gradient [T, columns], None without y; rows
    without a route become zero.
    """
    tokens, hidden = shape
    block = min(triton.next_power_of_2(hidden), 8192)
    outputs = (
        Output((rows, hidden), dtypes[0]),
        None if dtypes[1] is None else Output((tokens, columns), dtypes[1]),
        Output((rows,), "uint8", begins=0.0),
    )
    constants = (by_mask, hidden <= block, block, triton.next_power_of_2(columns))
    sending = Launch(
        send_weighted_kernel,
        (tokens, 1, 1),
        outputs,
        (tokens, rows, hidden, columns),
        constants,
        warps=min(max(block // 1024, 1), 8),
    )
    inputs = ("dx", "map", "pad_offsets", "weights", "y")
    steps = (
        step(sending, inputs, ("dy", "grad_weights", "taken")),
        _clearing(rows, hidden, "dy", None),
    )
    return Program(inputs, steps, ("dy", None if dtypes[1] is None else "grad_weights"))


def _clearing(rows: int, hidden: int, y: str, row_probs: str | None) -> ProgramStep:
    block = min(triton.next_power_of_2(hidden), 128)
    grid = (ceil_div(rows, _CLEARED), 1, 1)
    launch = Launch(
        clear_kernel, grid, (), (rows, hidden), (_CLEARED, block), warps=4, in_place=(0, 1)
    )
    return ProgramStep(launch, (y, row_probs, "taken"), ())


def _tile(hidden: int) -> tuple[int, int]:
    """Choose (values, warps) for a program: the largest power of two that leaves at most an eighth of its lanes idle.

    Adjacent programs process the parts of one row. [16384, 4096] bfloat16 to 131072 rows on an H200: 0.318 ms in parts
    of 2048, 0.326 in one part; the inverse with four rows at once 0.281, with one row at a time in one part 0.296.
    """
    if ceil_div(hidden, 2048) * 2048 <= hidden * 1.125:
        return 2048, 4
    block = min(triton.next_power_of_2(hidden), 1024)
    return block, max(block // 512, 1)

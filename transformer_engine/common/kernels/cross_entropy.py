"""loss = ln(sum(exp(x))) - x[target] per row, and dx = (softmax(x) - one_hot(target)) * factor, in float32.

x is contiguous [rows, width]: the columns first .. first + width of a vocabulary with `total` classes, whose other
columns may be on other ranks. Four launches:

* statistics: x -> partials [strips, rows, 4]: for each column strip max, sum(exp(x - max)), x[target], and its share of
  the mean of x over all classes.
* losses: partials from all strips on all ranks -> loss [rows], and max and sum(exp(x - max)) over full rows.
* gradient: x, max, sum -> dx, optionally overwriting x.
* rescale: x *= factor; reads nothing if the factor is 1.

Label smoothing s replaces one_hot(target) by (1 - s) one_hot(target) + s / total. A row whose target is `ignored` has
loss 0 and gradient 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from ..operation_settings import Labels
from .launch import Launch, Output

_BLOCK = 8192  # columns that a program holds at once: 16 KiB in bfloat16
_STRIP = 4  # numbers per strip
_ROWS = 128  # rows per program that adds strips
_SCALED = 4096  # values that a program multiplies at once
_PROGRAMS = 2112  # 16 for each processor on an H200, the largest number of resident programs


@triton.jit
def _statistics(
    x,
    targets,
    partials,
    rows,
    width,
    strip_width,
    first_id,
    share,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the partials for one column strip of one row per program."""
    row = tl.program_id(0)
    strip = tl.program_id(1)
    source = x + row.to(tl.int64) * width
    start = strip * strip_width
    end = tl.minimum(start + strip_width, width)
    lane = tl.arange(0, BLOCK)
    row_max = float("-inf")
    total = 0.0
    plain = 0.0
    for column in range(start, end, BLOCK):
        inside = column + lane < end
        value = tl.load(source + column + lane, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(row_max, tl.max(value, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(row_max - base) + tl.sum(tl.exp(value - base), 0)
        row_max = highest
        if SUMS:
            # large logits have an infinite sum
            plain += tl.sum(tl.where(inside, value * share, 0.0), 0)
    position = tl.load(targets + row) - first_id
    in_shard = (position >= start) & (position < end)
    target_logit = tl.load(source + position, mask=in_shard, other=float("-inf")).to(tl.float32)
    target = partials + (strip.to(tl.int64) * rows + row) * 4
    tl.store(target, row_max)
    tl.store(target + 1, total)
    tl.store(target + 2, target_logit)
    tl.store(target + 3, plain)


@triton.jit
def _losses(
    partials,
    targets,
    loss,
    statistics,
    rows,
    strips,
    ignored,
    smoothing,
    BLOCK: tl.constexpr,
):
    """Compute the losses for BLOCK rows per program, strip after strip."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    target_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for strip in range(strips):
        source = partials + (strip * rows + row.to(tl.int64)) * 4
        other = tl.load(source, mask=inside, other=float("-inf"))
        highest = tl.maximum(row_max, other)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        added = tl.load(source + 1, mask=inside, other=0.0) * tl.exp(other - base)
        total = total * tl.exp(row_max - base) + added
        row_max = highest
        target_logit = tl.maximum(
            target_logit, tl.load(source + 2, mask=inside, other=float("-inf"))
        )
        plain += tl.load(source + 3, mask=inside, other=0.0)
    exact = (row_max - target_logit) + tl.log(total)
    spread = (row_max - plain) + tl.log(total)
    result = exact
    if smoothing != 0.0:
        result = (1.0 - smoothing) * exact + smoothing * spread
    counts = tl.load(targets + row, mask=inside, other=0) != ignored
    tl.store(loss + row, tl.where(counts, result, 0.0), mask=inside)
    tl.store(statistics + 2 * row.to(tl.int64), row_max, mask=inside)
    tl.store(statistics + 2 * row.to(tl.int64) + 1, total, mask=inside)


@triton.jit
def _gradient(
    x,
    targets,
    statistics,
    factor,
    dx,
    width,
    first_id,
    ignored,
    smoothing,
    total_ids,
    factor_stride,
    BLOCK: tl.constexpr,
):
    """Compute the gradient for BLOCK columns in one row per program; without dx, x is overwritten with it."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    offset = row.to(tl.int64) * width + column
    target = tl.load(targets + row)
    row_max = tl.load(statistics + 2 * row.to(tl.int64))
    inverse = 1.0 / tl.load(statistics + 2 * row.to(tl.int64) + 1)
    value = tl.load(x + offset, mask=inside, other=float("-inf")).to(tl.float32)
    probability = tl.exp(value - row_max) * inverse
    target_probability = (
        tl.where(column == target - first_id, 1.0 - smoothing, 0.0) + smoothing / total_ids
    )
    result = (probability - target_probability) * tl.load(factor + row.to(tl.int64) * factor_stride)
    result = tl.where(target == ignored, 0.0, result)
    if dx is None:
        tl.store(x + offset, result.to(x.dtype.element_ty), mask=inside)
    else:
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _rescale(x, factor, rows, width, parts, BLOCK: tl.constexpr):
    """Multiply `parts` blocks with BLOCK values per program, one grid apart; return at once if the factor is 1."""
    multiplier = tl.load(factor)
    if multiplier != 1.0:
        elements = tl.cast(rows, tl.int64) * width
        for i in range(parts):
            part = tl.program_id(0).to(tl.int64) + tl.cast(i, tl.int64) * tl.num_programs(0)
            offsets = part * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + offsets, mask=offsets < elements, other=0.0).to(tl.float32)
            tl.store(
                x + offsets, (value * multiplier).to(x.dtype.element_ty), mask=offsets < elements
            )


def statistics(rows: int, width: int, strips: int, labels: Labels) -> Launch:
    """Launch (x [rows, width], targets int64 [rows]) -> partials float32 [strips, rows, 4]."""
    block = min(_BLOCK, max(triton.next_power_of_2(width), 16))
    strip_width = ceil_div(ceil_div(width, strips), block) * block
    return Launch(
        _statistics,
        (rows, strips, 1),
        (Output((strips, rows, _STRIP), "float32"),),
        (rows, width, strip_width, labels.first, 1.0 / labels.total),
        (labels.smoothing != 0.0, block),
        warps=8 if block == _BLOCK else 4,
    )


def losses(rows: int, strips: int, labels: Labels) -> Launch:
    """Launch (partials [strips, rows, 4], targets [rows]) -> loss [rows], statistics [rows, 2]: max, sum."""
    return Launch(
        _losses,
        (ceil_div(rows, _ROWS), 1, 1),
        (Output((rows,), "float32"), Output((rows, 2), "float32")),
        (rows, strips, labels.ignored, float(labels.smoothing)),
        (_ROWS,),
        warps=4,
    )


def gradient(
    rows: int, width: int, labels: Labels, dtype: str, per_row: bool, in_place: bool
) -> Launch:
    """Launch (x, targets, statistics, factor float32 [rows] or [1]) -> dx, or nothing if x is overwritten."""
    block = min(_BLOCK, max(triton.next_power_of_2(width), 16))
    return Launch(
        _gradient,
        (rows, ceil_div(width, block), 1),
        (None if in_place else Output((rows, width), dtype),),
        (
            width,
            labels.first,
            labels.ignored,
            float(labels.smoothing),
            float(labels.total),
            int(per_row),
        ),
        (block,),
        warps=8 if block == _BLOCK else 4,
        in_place=(0,) if in_place else (),
    )


def rescale(rows: int, width: int) -> Launch:
    """Launch (x [rows, width], factor float32 [1]) that overwrites x with x * factor."""
    parts = ceil_div(rows * width, _SCALED)
    programs = min(parts, _PROGRAMS)
    scalars = (rows, width, ceil_div(parts, programs))
    return Launch(_rescale, (programs, 1, 1), (), scalars, (_SCALED,), warps=4, in_place=(0,))

"""y = (x - mean) * rstdev * gamma + beta, y = x * rstdev * gamma and their gradients, on matrix rows.

x, dy, dx and y are [rows, width] with unit column stride; an RMSNorm has mean = None. All arithmetic is float32. The
forward kernels round y to x's dtype and store y, or FP8 codes [rows, width] = saturate(y * multiplier), or both; a
given amax becomes max(amax, max|y|). There is one multiplier for all elements or, with MAXIMUM above 0, one for each 1
x 128 block; the block multipliers' inverses, the scales, are stored as [blocks per row, rows]. Each program sums the
gamma and beta gradients over its own rows into a workspace [1 or 2, programs, width], which is then summed over the
programs in a fixed order. There are no atomics, so that two runs give the same bits.

Longer than 400 lines because the kernels share the tables that size them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from .block_cast import Blocks
from .conversion import NATIVE
from .launch import MEASURED_MEMORY, Launch, Machine, Output, codes_dtype
from .program import Program, ProgramStep
from .rounding import as_float, magnitude_bits, scale_from_amax, take_multiplier, to_codes

WIDTH = tl.constexpr(128)  # elements per block


@triton.jit
def load_multiplier(multiplier, scale, program, ZERO_IS_ONE: tl.constexpr):
    """Code multiplier, 1 without codes; program 0 stores its inverse."""
    factor = 1.0
    if multiplier is not None:
        factor = take_multiplier(multiplier, ZERO_IS_ONE)
        if program == 0:
            tl.store(scale, tl.div_rn(1.0, factor))
    return factor


@triton.jit
def maximum_before(amax):
    """int32 bits of amax when the program begins; most programs do not exceed it."""
    current = 0
    if amax is not None:
        current = tl.load(amax.to(tl.pointer_type(tl.int32)))
    return current


@triton.jit
def record_maximum(amax, bits, known):
    """Compute amax = max(amax, the number with these bits), compared as integers, where NaN is the largest."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), bits, mask=bits > known, sem="relaxed")


@triton.jit
def _multipliers_of_blocks(
    rounded,
    mask,
    scale,
    row,
    rows,
    first_column,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
):
    """Get every element's multiplier by its block in a ROWS x COLUMNS tile; store the blocks' inverses."""
    BLOCK: tl.constexpr = min(WIDTH, COLUMNS)
    COUNT: tl.constexpr = COLUMNS // BLOCK
    bits = tl.where(mask, magnitude_bits(rounded), 0)
    amax = as_float(tl.max(tl.reshape(bits, [ROWS, COUNT, BLOCK]), 2))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    m = row + tl.arange(0, ROWS)[:, None]
    block = first_column // WIDTH + tl.arange(0, COUNT)[None, :]
    valid = (m < rows) & (block * WIDTH < width)
    tl.store(scale + block.to(tl.int64) * rows + m, decode, mask=valid)
    return tl.reshape(tl.broadcast_to(multiplier[:, :, None], [ROWS, COUNT, BLOCK]), rounded.shape)


@triton.jit
def _emit(
    result,
    y,
    codes,
    scale,
    row,
    rows,
    first_column,
    width,
    offset,
    mask,
    factor,
    element: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    POLICY: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store the tile's requested results, rounded to `element`; return its magnitudes' int32 bits, 0 outside.

    Codes are stored in runs as long as the runs in which x is read. Longer 16-byte runs would make the compiler
    distribute the row over the threads differently, and the statistics' last bits would change.
    """
    rounded = result.to(element)
    if y is not None:
        tl.store(y + offset, rounded, mask=mask, eviction_policy=POLICY)
    if codes is not None:
        run: tl.constexpr = 128 // element.primitive_bitwidth
        nothing = tl.program_id(1) * run  # always 0; to the compiler, a multiple of run
        if MAXIMUM > 0.0:
            factor = _multipliers_of_blocks(
                rounded,
                mask,
                scale,
                row,
                rows,
                first_column,
                width,
                ROWS,
                COLUMNS,
                MAXIMUM,
                EPSILON,
                POWER_OF_TWO,
                VALUE_FOR_INF,
            )
        narrow = to_codes(rounded.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
        tl.store(codes + nothing + offset, narrow, mask=mask)
    return tl.where(mask, magnitude_bits(rounded), 0)


@triton.jit
def _normalize(
    value, gamma, beta, inside, mean, rstdev, row, valid, width, eps, ZERO_CENTERED: tl.constexpr
):
    """Normalize a tile [rows, width] of float32 values that are 0 outside; store its statistics.

    gamma and beta are pointers: they are read late, so that they need no registers while the sums are computed.
    """
    if mean is not None:
        average = tl.sum(value, 1) / width
        value = tl.where(inside, value - average[:, None], 0.0)
        tl.store(mean + row, average, mask=valid)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(rstdev + row, inverse, mask=valid)
    scale = tl.load(gamma, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        scale += 1.0
    result = value * inverse[:, None] * scale
    if beta is not None:
        result += tl.load(beta, mask=inside, other=0.0).to(tl.float32)
    return result


@triton.jit
def forward_rows(
    x,
    gamma,
    beta,
    multiplier,
    amax,
    codes,
    scale,
    y,
    mean,
    rstdev,
    rows,
    width,
    x_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Normalize BLOCK_ROWS whole rows per program, in registers."""
    factor = load_multiplier(multiplier, scale, tl.program_id(0), ZERO_IS_ONE)
    current = maximum_before(amax)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = column < width
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = row < rows
    mask = valid[:, None] & inside
    offset = row.to(tl.int64)[:, None]
    value = tl.load(x + offset * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    result = _normalize(
        value,
        gamma + column,
        beta + column if beta is not None else None,
        inside,
        mean,
        rstdev,
        row,
        valid,
        width,
        eps,
        ZERO_CENTERED,
    )
    bits = _emit(
        result,
        y,
        codes,
        scale,
        tl.program_id(0) * BLOCK_ROWS,
        rows,
        0,
        width,
        offset * width + column,
        mask,
        factor,
        x.dtype.element_ty,
        BLOCK_ROWS,
        BLOCK_WIDTH,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        "",
        CONVERSION,
    )
    if amax is not None:
        record_maximum(amax, tl.max(bits), current)


@triton.jit
def forward_streamed(
    x,
    gamma,
    beta,
    multiplier,
    amax,
    codes,
    scale,
    y,
    mean,
    rstdev,
    rows,
    width,
    x_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Normalize one row after another in registers, while the next rows are loaded to shared memory."""
    factor = load_multiplier(multiplier, scale, tl.program_id(0), ZERO_IS_ONE)
    current = maximum_before(amax)
    greatest = 0
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    weight = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    if beta is not None:
        shift = tl.load(beta + column, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offset = tl.cast(row, tl.int64)
        value = tl.load(x + offset * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if mean is not None:
            average = tl.sum(value, 0) / width
            value = tl.where(inside, value - average, 0.0)
            tl.store(mean + row, average)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(rstdev + row, inverse)
        result = value * inverse * weight
        if beta is not None:
            result += shift
        bits = _emit(
            result,
            y,
            codes,
            scale,
            row,
            rows,
            0,
            width,
            offset * width + column,
            inside,
            factor,
            x.dtype.element_ty,
            1,
            BLOCK_WIDTH,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            "",
            CONVERSION,
        )
        if amax is not None:
            # a maximum per column spills registers
            greatest = tl.maximum(greatest, tl.max(bits, 0))
    if amax is not None:
        record_maximum(amax, greatest, current)


@triton.jit
def forward_wide(
    x,
    gamma,
    beta,
    multiplier,
    amax,
    codes,
    scale,
    y,
    mean,
    rstdev,
    rows,
    width,
    x_stride,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Normalize one row of any length per program.

    Each statistic reads the row once, and scaling once more; reads after the first hit the cache.
    """
    row = tl.program_id(0)
    factor = load_multiplier(multiplier, scale, row, ZERO_IS_ONE)
    current = maximum_before(amax)
    greatest = tl.zeros([BLOCK_WIDTH], tl.int32)
    source = x + row.to(tl.int64) * x_stride
    target = row.to(tl.int64) * width
    lane = tl.arange(0, BLOCK_WIDTH)
    average = 0.0
    if mean is not None:
        total = tl.zeros([BLOCK_WIDTH], tl.float32)
        for first in range(0, width, BLOCK_WIDTH):
            column = first + lane
            total += tl.load(
                source + column, mask=column < width, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
        average = tl.sum(total, 0) / width
        tl.store(mean + row, average)
    squares = tl.zeros([BLOCK_WIDTH], tl.float32)
    for first in range(0, width, BLOCK_WIDTH):
        column = first + lane
        inside = column < width
        value = tl.load(source + column, mask=inside, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        value = tl.where(inside, value - average, 0.0)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    tl.store(rstdev + row, inverse)
    for first in range(0, width, BLOCK_WIDTH):
        column = first + lane
        inside = column < width
        value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        result = (value - average) * inverse * weight
        if beta is not None:
            result += tl.load(beta + column, mask=inside, other=0.0).to(tl.float32)
        bits = _emit(
            result,
            y,
            codes,
            scale,
            row,
            rows,
            first,
            width,
            target + column,
            inside,
            factor,
            x.dtype.element_ty,
            1,
            BLOCK_WIDTH,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            "evict_first",
            CONVERSION,
        )
        if amax is not None:
            greatest = tl.maximum(greatest, bits)
    if amax is not None:
        record_maximum(amax, tl.max(greatest), current)


@triton.jit
def _round_product(product, dtype: tl.constexpr, positive):
    """Round a product to a dtype before a sum: a fused multiply-add would not round it.

    The factor is 1 for every positive number. The compiler, which does not know this, fuses the second product with the
    sum, so that the first one is rounded to float32.
    """
    if dtype == tl.float32:
        return product * (positive > 0).to(tl.float32)
    return product.to(dtype).to(tl.float32)


@triton.jit
def backward_rows(
    dy,
    x,
    add,
    gamma,
    mean,
    rstdev,
    dx,
    workspace,
    rows,
    width,
    dy_stride,
    x_stride,
    add_stride,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    KEEPS_GAMMA: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """dx = rstdev * (g - E[g] - xhat * E[g * xhat]) + add with g = dy * gamma; sums of dy * xhat and of dy.

    With ROUNDS_FIRST, dx is rounded to its dtype before `add` is added.
    """
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = column < width
    if KEEPS_GAMMA:
        scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
    dgamma = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    dbeta = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for first in tl.range(tl.program_id(0) * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS)
        valid = row < rows
        mask = valid[:, None] & inside
        offset = row.to(tl.int64)[:, None]
        value = tl.load(x + offset * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + offset * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(rstdev + row, mask=valid, other=0.0)
        normalized = value * inverse[:, None]
        if mean is not None:
            average = tl.load(mean + row, mask=valid, other=0.0)
            normalized = (value - average[:, None]) * inverse[
                :, None
            ]  # times a zero gradient outside
            dbeta += gradient
        dgamma += gradient * normalized
        if not KEEPS_GAMMA:
            scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
            if ZERO_CENTERED:
                scale += 1.0
        scaled = gradient * scale
        result = scaled - normalized * (tl.sum(scaled * normalized, 1) / width)[:, None]
        if mean is not None:
            result -= (tl.sum(scaled, 1) / width)[:, None]
        result *= inverse[:, None]
        if add is not None:
            if ROUNDS_FIRST:
                result = _round_product(result, dx.dtype.element_ty, rows)
            result += tl.load(add + offset * add_stride + column, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx + offset * width + column, result.to(dx.dtype.element_ty), mask=mask)
    _store_sums(
        dgamma, dbeta, mean, workspace, tl.program_id(0), tl.num_programs(0), 0, width, BLOCK_WIDTH
    )


@triton.jit
def _store_sums(
    dgamma,
    dbeta,
    mean,
    workspace,
    program,
    programs,
    first_column,
    width,
    BLOCK_WIDTH: tl.constexpr,
):
    """Store one program's workspace [1 or 2, programs, width]: the sums over its two tiles' rows."""
    column = first_column + tl.arange(0, BLOCK_WIDTH)
    partial = workspace + program.to(tl.int64) * width + column
    tl.store(partial, tl.sum(dgamma, 0), mask=column < width)
    if mean is not None:
        tl.store(partial + programs.to(tl.int64) * width, tl.sum(dbeta, 0), mask=column < width)


@triton.jit
def backward_wide(
    dy,
    x,
    add,
    gamma,
    mean,
    rstdev,
    dx,
    rows,
    width,
    dy_stride,
    x_stride,
    add_stride,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Compute dx for one row per program, with any length, in two reads: for the two means, and for the gradient.

    With ROUNDS_FIRST, dx is rounded to its dtype before `add` is added.
    """
    row = tl.program_id(0)
    offset = row.to(tl.int64)
    lane = tl.arange(0, BLOCK_WIDTH)
    inverse = tl.load(rstdev + row)
    average = 0.0
    if mean is not None:
        average = tl.load(mean + row)
    products = tl.zeros([BLOCK_WIDTH], tl.float32)
    sums = tl.zeros([BLOCK_WIDTH], tl.float32)
    for first in range(0, width, BLOCK_WIDTH):
        column = first + lane
        inside = column < width
        gradient = tl.load(dy + offset * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + offset * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
        scaled = gradient * scale
        products += scaled * ((value - average) * inverse)
        sums += scaled
    projection = tl.sum(products, 0) / width
    balance = 0.0
    if mean is not None:
        balance = tl.sum(sums, 0) / width
    for first in range(0, width, BLOCK_WIDTH):
        column = first + lane
        inside = column < width
        gradient = tl.load(dy + offset * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + offset * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            scale += 1.0
        result = (gradient * scale - balance - (value - average) * inverse * projection) * inverse
        if add is not None:
            if ROUNDS_FIRST:
                result = _round_product(result, dx.dtype.element_ty, rows)
            result += tl.load(add + offset * add_stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(dx + offset * width + column, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    dy,
    x,
    mean,
    rstdev,
    workspace,
    rows,
    width,
    dy_stride,
    x_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum dy * xhat and dy over this program's share of the rows, BLOCK_WIDTH columns."""
    first_column = tl.program_id(0) * BLOCK_WIDTH
    column = (first_column + tl.arange(0, BLOCK_WIDTH))[None, :]
    dgamma = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    dbeta = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    step = tl.num_programs(1) * BLOCK_ROWS
    for first in tl.range(tl.program_id(1) * BLOCK_ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_ROWS)
        valid = row < rows
        mask = valid[:, None] & (column < width)
        offset = row.to(tl.int64)[:, None]
        value = tl.load(x + offset * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.load(dy + offset * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        if mean is not None:
            value -= tl.load(mean + row, mask=valid, other=0.0)[:, None]
            dbeta += gradient
        dgamma += gradient * (value * tl.load(rstdev + row, mask=valid, other=0.0)[:, None])
    _store_sums(
        dgamma,
        dbeta,
        mean,
        workspace,
        tl.program_id(1),
        tl.num_programs(1),
        first_column,
        width,
        BLOCK_WIDTH,
    )


@triton.jit
def sum_partials(
    workspace,
    dgamma,
    dbeta,
    programs,
    width,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Compute dgamma (program_id(1) = 0) or dbeta (1) [width], summing workspace [program_id(1), programs, width]."""
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    source = workspace + tl.program_id(1).to(tl.int64) * programs * width
    total = tl.zeros([BLOCK_PROGRAMS, BLOCK_WIDTH], tl.float32)
    for first in range(0, programs, BLOCK_PROGRAMS):
        program = first + tl.arange(0, BLOCK_PROGRAMS)
        mask = (program < programs)[:, None] & inside[None, :]
        total += tl.load(
            source + program.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0
        )
    result = tl.sum(total, 0)
    if dbeta is None:
        tl.store(dgamma + column, result.to(dgamma.dtype.element_ty), mask=inside)
    else:
        if tl.program_id(1) == 0:
            tl.store(dgamma + column, result.to(dgamma.dtype.element_ty), mask=inside)
        else:
            tl.store(dbeta + column, result.to(dbeta.dtype.element_ty), mask=inside)


class NormRows(NamedTuple):
    """Settings for every forward pass: x [rows, width], its row stride in elements, the norm, and the GPU."""

    rows: int
    width: int
    stride: int
    dtype: str
    eps: float
    zero_centered: bool
    centered: bool
    processors: int
    shared_memory: int = MEASURED_MEMORY


def forward(
    x: NormRows,
    element: Element | None = None,
    blocks: Blocks | None = None,
    *,
    measures: bool = False,
    zero_is_one: bool = False,
) -> Launch:
    """Forward-pass launch.

    Inputs: x, gamma, beta | None, code multiplier float32 [1] or None, amax float32 [1] or None, which becomes
    max(amax, max|y|). Outputs: codes [rows, width], scale, y [rows, width], mean float32 [rows] if centered, rstdev
    [rows].

    Args:
        x: Sizes and settings.
        element: Codes with one given multiplier; scale is float32 [1], and y is not stored.
        blocks: Codes in 1 x 128 blocks along the rows; multiplier is None, scale is [blocks, rows].
        measures: The first output is amax = max|y| instead.
        zero_is_one: Read a given zero multiplier as 1.
    """
    rows, width, x_stride, dtype, eps, zero_centered, centered, processors, shared_memory = x
    machine = Machine(processors, shared_memory, 4 if dtype == "float32" else 2)
    fixed = (
        zero_centered,
        zero_is_one,
        *((0.0, 0.0, False, 0.0) if blocks is None else blocks.steps),
    )
    statistic = Output((rows,), "float32")
    statistics = (statistic if centered else None, statistic)
    if blocks is not None:
        scales = Output((ceil_div(width, 128), rows), "float32", transposed=True)
        outputs = (Output((rows, width), codes_dtype(blocks.element)), scales, None, *statistics)
    elif element is not None:
        outputs = (
            Output((rows, width), codes_dtype(element)),
            Output((1,), "float32"),
            None,
            *statistics,
        )
    else:
        outputs = (None, None, Output((rows, width), dtype), *statistics)
    if measures:
        outputs = (Output((1,), "float32", begins=0.0), *outputs)
    recorded = () if measures else (4,)
    scalars = (rows, width, x_stride, eps)
    block = triton.next_power_of_2(width)
    # Rates are an H200's in bf16, TB/s; a copy with the same size reaches 4.1 in the same measurement.
    if width > 16384:  # RMSNorm 3.5 at 32768, LayerNorm 2.9; whole rows in registers spill: 1.2
        grid, constants = (rows, 1, 1), (*fixed, 8192, NATIVE)
        return Launch(forward_wide, grid, outputs, scalars, constants, warps=32, in_place=recorded)
    # 3.4-3.6; one row per program 2.5-2.9, because gamma is read again from the L2 cache
    if width > 8192:
        grid = (min(rows, 2 * processors), 1, 1)
        return Launch(
            forward_streamed,
            grid,
            outputs,
            scalars,
            (*fixed, block, machine.stages(block, 3), NATIVE),
            16,
            in_place=recorded,
        )
    if centered and 4096 < width < block:  # 3.6 at 5120; one row per program 3.1-3.2
        grid = (min(rows, 2 * processors), 1, 1)
        return Launch(
            forward_streamed,
            grid,
            outputs,
            scalars,
            (*fixed, block, machine.stages(block, 4), NATIVE),
            8,
            in_place=recorded,
        )
    # 3.8-4.0 TB/s on an H200.
    block_rows, warps = (2 if centered else 1, 8) if block == 4096 else (max(1, 2048 // block), 4)
    grid = (ceil_div(rows, block_rows), 1, 1)
    constants = (*fixed, block_rows, block, NATIVE)
    return Launch(forward_rows, grid, outputs, scalars, constants, warps, in_place=recorded)


def backward(
    rows: int,
    width: int,
    strides: tuple[int, int, int],
    dtype: str,
    weight_dtype: str,
    zero_centered: bool,
    centered: bool,
    column_bytes: int,
    processors: int,
    shared_memory: int,
    rounds_first: bool = False,
) -> Program:
    """Program (dy, x, add | None, gamma, mean | None, rstdev) -> dx, dgamma [width], dbeta [width] | None.

    dx is [rows, width]; dbeta is present if centered. `strides` belong to dy, x and add (0 without it).

    Args:
        column_bytes: Bytes for one element each from dy, x and add: a pipeline stage's size per column.
        shared_memory: Bytes available to one program.
        rounds_first: Round dx to its dtype before `add` is added.
    """
    kinds = 2 if centered else 1
    dx = Output((rows, width), dtype)
    scalars = (rows, width, *strides)

    def fitting(stages: int, tile: int) -> int:
        return max(1, min(stages, (shared_memory - _REDUCTION_BYTES) // (tile * column_bytes)))

    # A LayerNorm holds two sums per column; beyond 8192 columns they do not fit into registers with a row (1.1 TB/s).
    if width > (8192 if centered else 16384):
        programs = min(32, ceil_div(rows, 32))
        workspace = Output((kinds, programs, width), "float32")
        grid = (ceil_div(width, 128), programs, 1)
        first = Launch(
            backward_wide,
            (rows, 1, 1),
            (dx,),
            scalars,
            (zero_centered, 4096, rounds_first),
            warps=16,
        )
        constants = (32, 128, fitting(3, 32 * 128))
        second = Launch(column_sums, grid, (workspace,), scalars[:4], constants, warps=4)
        return _sum_steps(
            ProgramStep(first, _GIVEN, ("dx",)),
            ProgramStep(second, ("dy", "x", "mean", "rstdev"), ("workspace",)),
            sums=_sum_partials(programs, width, weight_dtype, centered),
        )
    block = triton.next_power_of_2(width)
    block_rows, warps, resident, stages = _backward_tile(width)
    programs = min(ceil_div(rows, block_rows), resident * processors)
    workspace = Output((kinds, programs, width), "float32")
    depth = fitting(stages, block_rows * block)
    constants = (zero_centered, block_rows, block, depth, width <= 8192, rounds_first)
    first = Launch(backward_rows, (programs, 1, 1), (dx, workspace), scalars, constants, warps)
    return _sum_steps(
        ProgramStep(first, _GIVEN, ("dx", "workspace")),
        sums=_sum_partials(programs, width, weight_dtype, centered),
    )


_GIVEN = ("dy", "x", "add", "gamma", "mean", "rstdev")


def _sum_steps(*steps: ProgramStep, sums: Launch) -> Program:
    """Append the workspace's sums to the steps, which compute dx and a workspace."""
    gradients = ("dgamma", None if sums.outputs[1] is None else "dbeta")
    return Program(
        _GIVEN, (*steps, ProgramStep(sums, ("workspace",), gradients)), ("dx", *gradients)
    )


# Shared memory for a program's reductions, in addition to its pipeline; 4.1 KB were measured.
_REDUCTION_BYTES = 8192


def _backward_tile(width: int) -> tuple[int, int, int, int]:
    """Choose (tile rows, warps, programs per multiprocessor, stages), with an H200's TB/s in bf16."""
    if width > 8192:
        return 1, 16, 1, 1  # 3.4-3.6 with gamma read again for each row; keeping it spills: 3.2-3.5
    if width > 6144:
        return 1, 8, 1, 3  # 4.0
    if width > 4096:
        return 1, 8, 1, 4  # RMSNorm 3.8, LayerNorm 3.2; three stages 3.3, 3.1
    if width > 2048:
        return 1, 8, 2, 3  # 3.9
    return max(1, 2048 // triton.next_power_of_2(width)), 4, 4, 3  # 3.9-4.0


def _sum_partials(programs: int, width: int, weight_dtype: str, centered: bool) -> Launch:
    gradient = Output((width,), weight_dtype)
    grid = (ceil_div(width, 16), 2 if centered else 1, 1)
    outputs = (gradient, gradient if centered else None)
    return Launch(sum_partials, grid, outputs, (programs, width), (32, 16), warps=8)

"""Quantization statistics for x [M, K]: max|x|, counts and squared sums, from one read of x, codes and scales."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import ceil_div
from .conversion import NATIVE
from .launch import Launch, Output
from .program import Program, ProgramStep
from .rounding import to_values

# The statistics in order; the first is a maximum, the others are sums.
FIELDS = ("maximum", "underflow", "saturation", "signal", "noise", "nonfinite")
_WIDTH = tl.constexpr(8)  # partial-result columns: the next power of two
_NEIGHBOURS = tl.constexpr(8)  # two-byte elements that one thread loads at once
# values for `Codes.scaling`
NO_CODES, ONE_SCALE, FLOAT_BLOCKS, EXPONENT_BLOCKS, TWO_LEVELS = range(5)
_NO_CODES, _ONE_SCALE = tl.constexpr(NO_CODES), tl.constexpr(ONE_SCALE)
_EXPONENT_BLOCKS, _TWO_LEVELS = tl.constexpr(EXPONENT_BLOCKS), tl.constexpr(TWO_LEVELS)


class Codes(NamedTuple):
    """Layout and scaling of a matrix's codes.

    Attributes:
        scaling: One of the five constants above.
        packed: Two 4-bit codes per byte, the low one first.
        block: Rows and columns that share a scale.
        greatest: Magnitude of the largest code.
        beyond: Values above this multiple of `greatest` count as saturated.
        strides: Code and scale strides.
    """

    scaling: int = NO_CODES
    packed: bool = False
    block: tuple[int, int] = (1, 1)
    greatest: float = 0.0
    beyond: float = 1.0
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)


@triton.jit
def _fourbit(code):
    """Decode four bits in E2M1."""
    exponent = ((code >> 1) & 3).to(tl.int32)
    mantissa = (code & 1).to(tl.float32)
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def _fourbits_of_tile(
    codes, row, column, M, K, code_row, code_column, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Read the codes of a tile [M, K] as numbers, from its bytes [M, K / 2]."""
    pair = tl.min(column, axis=0) // 2 + tl.arange(0, BLOCK_K // 2)
    inside = (row < M)[:, None] & (pair * 2 < K)[None, :]
    byte = tl.load(
        codes + row[:, None] * code_row + pair[None, :] * code_column, mask=inside, other=0
    )
    return tl.reshape(tl.join(_fourbit(byte & 15), _fourbit(byte >> 4)), [BLOCK_M, BLOCK_K])


@triton.jit
def _power_of_two(exponent):
    """Compute 2^(exponent - 127) for a byte; NaN for 255."""
    bits = tl.where(exponent == 0, 0x00400000, exponent.to(tl.int32) << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _neighbours(values):
    """Reshape values [M, K] to [M, K / 8, 8]: one thread holds eight adjacent values and adds them without exchange."""
    groups: tl.constexpr = values.shape[1] // _NEIGHBOURS
    return tl.reshape(values, [values.shape[0], groups, _NEIGHBOURS])


@triton.jit
def _scales_of_tile(
    scales,
    row,
    column,
    M,
    K,
    scale_row,
    scale_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load the scales for a tile's elements, [M, 1] or [1, K] if the tile has one scale along an axis."""
    of_row, of_column = (row // ROWS) * scale_row, (column // COLUMNS) * scale_column
    if COLUMNS % BLOCK_K == 0:
        scale_tile = tl.load(scales + of_row + tl.min(of_column, axis=0), mask=row < M, other=0.0)[
            :, None
        ]
    elif ROWS % BLOCK_M == 0:
        scale_tile = tl.load(
            scales + of_column + tl.min(of_row, axis=0), mask=column < K, other=0.0
        )[None, :]
    elif COLUMNS > 1:
        groups: tl.constexpr = BLOCK_K // COLUMNS
        group = tl.min(column, axis=0) // COLUMNS + tl.arange(0, groups)
        inside = (row < M)[:, None] & (group * COLUMNS < K)[None, :]
        offsets = of_row[:, None] + (group * scale_column)[None, :]
        once = tl.load(scales + offsets, mask=inside, other=0.0)[:, :, None]
        scale_tile = tl.reshape(
            tl.broadcast_to(once, [BLOCK_M, groups, COLUMNS]), [BLOCK_M, BLOCK_K]
        )
    else:
        inside = (row < M)[:, None] & (column < K)[None, :]
        scale_tile = tl.load(scales + of_row[:, None] + of_column[None, :], mask=inside, other=0.0)
    return scale_tile


@triton.jit
def _strip_statistics(
    x,
    codes,
    scales,
    second,
    first_row,
    column,
    M,
    K,
    x_row,
    x_column,
    code_row,
    code_column,
    scale_row,
    scale_column,
    SCALING: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GREATEST: tl.constexpr,
    BEYOND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    GUARDED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute the six statistics over BLOCK_M * TILES rows from first_row on.

    Args:
        WHOLE: Every tile that begins inside the matrix ends inside, so that nothing is masked.
        GUARDED: Values can be infinite or NaN; otherwise such values count like any other, and the signal is not
            finite.
    """
    greatest = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    underflow = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    saturation = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    signal = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    noise = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    nonfinite = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    tiles = tl.minimum(TILES, tl.cdiv(M - first_row, BLOCK_M)).to(tl.int32)
    for index in range(tiles):
        row = first_row + index * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < M)[:, None] & (column < K)[None, :]
        values_lie = x + row[:, None] * x_row + column[None, :] * x_column
        values = tl.load(values_lie) if WHOLE else tl.load(values_lie, mask=inside, other=0.0)
        values = values.to(tl.float32)
        magnitude = tl.abs(values)
        if GUARDED:
            finite = magnitude < float("inf")
            nonfinite += tl.sum(_neighbours(tl.where(finite, 0.0, 1.0)), axis=2)
            values = tl.where(finite, values, 0.0)
            magnitude = tl.where(finite, magnitude, 0.0)
        greatest = tl.maximum(greatest, tl.max(_neighbours(magnitude), axis=2))
        signal += tl.sum(_neighbours(values * values), axis=2)
        if SCALING != _NO_CODES:
            if PACKED:
                code = _fourbits_of_tile(
                    codes, row, column, M, K, code_row, code_column, BLOCK_M, BLOCK_K
                )
            else:
                codes_lie = codes + row[:, None] * code_row + column[None, :] * code_column
                code = tl.load(codes_lie) if WHOLE else tl.load(codes_lie, mask=inside, other=0.0)
                code = to_values(code, CONVERSION)
            if SCALING == _ONE_SCALE:
                scale = tl.load(scales)
            else:
                scale = _scales_of_tile(
                    scales,
                    row,
                    column,
                    M,
                    K,
                    scale_row,
                    scale_column,
                    ROWS,
                    COLUMNS,
                    BLOCK_M,
                    BLOCK_K,
                )
                if SCALING == _EXPONENT_BLOCKS:
                    scale = _power_of_two(scale)
                elif SCALING == _TWO_LEVELS:
                    scale = to_values(scale, CONVERSION)
            quantized, largest = code * scale, GREATEST * scale
            if SCALING == _TWO_LEVELS:
                quantized, largest = quantized * tl.load(second), largest * tl.load(second)
            error = values - quantized
            if GUARDED:
                error = tl.where(finite, error, 0.0)
            noise += tl.sum(_neighbours(error * error), axis=2)
            lost = (magnitude > 0.0) & (code == 0.0)
            underflow += tl.sum(_neighbours(tl.where(lost, 1.0, 0.0)), axis=2)
            saturated = (tl.abs(code) == GREATEST) & (magnitude > tl.abs(largest) * BEYOND)
            saturation += tl.sum(_neighbours(tl.where(saturated, 1.0, 0.0)), axis=2)
    return (
        tl.max(greatest),
        tl.sum(underflow),
        tl.sum(saturation),
        tl.sum(signal),
        tl.sum(noise),
        tl.sum(nonfinite),
    )


@triton.jit
def statistics_kernel(
    x,
    codes,
    scales,
    second,
    partials,
    M,
    K,
    x_row,
    x_column,
    code_row,
    code_column,
    scale_row,
    scale_column,
    SCALING: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GREATEST: tl.constexpr,
    BEYOND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute partials [programs, 8]: the six statistics over BLOCK_M * TILES rows and BLOCK_K columns, and two zeros.

    ROWS, COLUMNS: elements that share a scale. A value that is not finite contributes only to its own count. Strips
    with such a value are read a second time, which saves five instructions per element in all others.
    """
    tiles_k = tl.cdiv(K, BLOCK_K)
    first_row = (tl.program_id(0) // tiles_k).to(tl.int64) * (TILES * BLOCK_M)
    column = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    greatest, underflow, saturation, signal, noise, nonfinite = _strip_statistics(
        x,
        codes,
        scales,
        second,
        first_row,
        column,
        M,
        K,
        x_row,
        x_column,
        code_row,
        code_column,
        scale_row,
        scale_column,
        SCALING,
        PACKED,
        ROWS,
        COLUMNS,
        GREATEST,
        BEYOND,
        BLOCK_M,
        BLOCK_K,
        TILES,
        WHOLE,
        False,
        CONVERSION,
    )
    if not (signal < float("inf")):
        greatest, underflow, saturation, signal, noise, nonfinite = _strip_statistics(
            x,
            codes,
            scales,
            second,
            first_row,
            column,
            M,
            K,
            x_row,
            x_column,
            code_row,
            code_column,
            scale_row,
            scale_column,
            SCALING,
            PACKED,
            ROWS,
            COLUMNS,
            GREATEST,
            BEYOND,
            BLOCK_M,
            BLOCK_K,
            TILES,
            WHOLE,
            True,
            CONVERSION,
        )
    row_of_results = partials + tl.program_id(0).to(tl.int64) * _WIDTH
    tl.store(row_of_results, greatest)
    tl.store(row_of_results + 1, underflow)
    tl.store(row_of_results + 2, saturation)
    tl.store(row_of_results + 3, signal)
    tl.store(row_of_results + 4, noise)
    tl.store(row_of_results + 5, nonfinite)
    tl.store(row_of_results + 6, 0.0)
    tl.store(row_of_results + 7, 0.0)


@triton.jit
def add_statistics(partials, kept, programs, BLOCK: tl.constexpr):
    """Add the partial statistics [programs, 8] of all programs to the totals `kept`, float64 [6].

    Entry 0 is a maximum, the other entries are sums.

    float64, because float32 cannot represent all counts above 2^24. One program adds in a fixed order: bits repeat.
    """
    column = tl.arange(0, _WIDTH)
    sums = tl.zeros([_WIDTH], tl.float64)
    greatest = tl.zeros([_WIDTH], tl.float64)
    for first in range(0, programs, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = (row < programs)[:, None] & (column >= 0)[None, :]
        values = tl.load(partials + row[:, None] * _WIDTH + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(values.to(tl.float64), axis=0)
        greatest = tl.maximum(greatest, tl.max(values, axis=0).to(tl.float64))
    before = tl.load(kept + column, mask=column < 6, other=0.0)
    after = tl.where(column == 0, tl.maximum(before, greatest), before + sums)
    tl.store(kept + column, after, mask=column < 6)


@functools.lru_cache(maxsize=1024)
def statistics(shape: tuple[int, int], strides: tuple[int, int], codes: Codes) -> Program:
    """Program (x [M, K], codes, scales, second [1], kept float64 [6]) that updates kept.

    codes, scales and second are None if `codes.scaling` does not need them.
    """
    rows, columns = shape
    block_m, block_k = _TILE
    tiles_k, tiles_m = ceil_div(columns, block_k), ceil_div(rows, block_m)
    # Eight programs on each of 132 processors: more programs mean more rows for the program that adds.
    tiles = max(1, min(tiles_m, tiles_m * tiles_k // 1056))
    programs = ceil_div(tiles_m, tiles) * tiles_k
    measure = Launch(
        statistics_kernel,
        (programs, 1, 1),
        (Output((programs, 8), "float32"),),
        (rows, columns, *strides, *codes.strides),
        (
            codes.scaling,
            codes.packed,
            *codes.block,
            codes.greatest,
            codes.beyond,
            block_m,
            block_k,
            tiles,
            rows % block_m == 0 and columns % block_k == 0,
            NATIVE,
        ),
        warps=4,
    )
    add = Launch(add_statistics, (1, 1, 1), (), (programs,), (_ADDED,), warps=4, in_place=(1,))
    steps = (
        ProgramStep(measure, ("x", "codes", "scales", "second"), ("partials",)),
        ProgramStep(add, ("partials", "kept"), ()),
    )
    return Program(("x", "codes", "scales", "second", "kept"), steps, ())


_TILE = (16, 128)
_ADDED = 512  # partial-result rows that are added at a time

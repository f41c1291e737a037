"""What quantization did to a matrix x [M, K]: max|x|, counts and squared sums, from one read of x, codes and scales."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output
from .program import Program, Step

# The statistics in their order; the first is a maximum, the others are sums.
FIELDS = ("maximum", "underflow", "saturation", "signal", "noise", "nonfinite")
_WIDTH = tl.constexpr(8)  # of a row of partial results: the next power of two
NO_CODES, ONE_SCALE, FLOAT_BLOCKS, EXPONENT_BLOCKS, TWO_LEVELS = range(5)  # how codes are scaled
_NO_CODES, _ONE_SCALE = tl.constexpr(NO_CODES), tl.constexpr(ONE_SCALE)
_EXPONENT_BLOCKS, _TWO_LEVELS = tl.constexpr(EXPONENT_BLOCKS), tl.constexpr(TWO_LEVELS)


class Codes(NamedTuple):
    """How the codes of a matrix lie and are scaled.

    scaling    one of the five above
    packed     two codes of four bits in a byte, the low one first
    block      rows and columns that share a scale
    greatest   the largest code's magnitude;  beyond  saturated is what lies beyond so many times it
    strides    of codes and of scales
    """

    scaling: int = NO_CODES
    packed: bool = False
    block: tuple[int, int] = (1, 1)
    greatest: float = 0.0
    beyond: float = 1.0
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)


@triton.jit
def _fourbit(byte, column):
    """E2M1 of the nibble that belongs to a column."""
    code = (byte >> ((column % 2) * 4).to(tl.uint8)) & 15
    exponent = ((code >> 1) & 3).to(tl.int32)
    mantissa = (code & 1).to(tl.float32)
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127) of a byte; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent.to(tl.int32) << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


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
):
    """partials [programs, 8]: the six statistics of BLOCK_M * TILES rows and BLOCK_K columns, and two zeros.

    ROWS, COLUMNS: elements that share a scale. A value that is not finite counts as such and nowhere else.
    """
    tiles_k = tl.cdiv(K, BLOCK_K)
    strip = tl.program_id(0) // tiles_k
    column = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    greatest = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    underflow = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    saturation = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    signal = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    noise = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    nonfinite = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for index in range(TILES):
        row = (strip * TILES + index).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < M)[:, None] & (column < K)[None, :]
        values = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0.0)
        values = values.to(tl.float32)
        magnitude = tl.abs(values)
        finite = magnitude < float("inf")
        nonfinite += tl.where(finite, 0.0, 1.0)
        values = tl.where(finite, values, 0.0)
        magnitude = tl.where(finite, magnitude, 0.0)
        greatest = tl.maximum(greatest, magnitude)
        signal += values * values
        if SCALING != _NO_CODES:
            place = column // 2 if PACKED else column
            code = tl.load(
                codes + row[:, None] * code_row + place[None, :] * code_column, mask=inside, other=0.0
            )
            code = _fourbit(code, column[None, :]) if PACKED else code.to(tl.float32)
            if SCALING == _ONE_SCALE:
                quantized = code * tl.load(scales)
            else:
                lies = (row // ROWS)[:, None] * scale_row + (column // COLUMNS)[None, :] * scale_column
                scale = tl.load(scales + lies, mask=inside, other=0.0)
                if SCALING == _EXPONENT_BLOCKS:
                    quantized = code * _power_of_two(scale)
                else:
                    quantized = code * scale.to(tl.float32)
                if SCALING == _TWO_LEVELS:
                    quantized = quantized * tl.load(second)
            error = tl.where(finite, values - quantized, 0.0)
            noise += error * error
            underflow += tl.where((magnitude > 0.0) & (code == 0.0), 1.0, 0.0)
            saturated = (tl.abs(code) == GREATEST) & (magnitude > tl.abs(quantized) * BEYOND)
            saturation += tl.where(saturated, 1.0, 0.0)
    row_of_results = partials + tl.program_id(0).to(tl.int64) * _WIDTH
    tl.store(row_of_results, tl.max(greatest))
    tl.store(row_of_results + 1, tl.sum(underflow))
    tl.store(row_of_results + 2, tl.sum(saturation))
    tl.store(row_of_results + 3, tl.sum(signal))
    tl.store(row_of_results + 4, tl.sum(noise))
    tl.store(row_of_results + 5, tl.sum(nonfinite))
    tl.store(row_of_results + 6, 0.0)
    tl.store(row_of_results + 7, 0.0)


@triton.jit
def add_statistics(partials, kept, programs, BLOCK: tl.constexpr):
    """kept float64 [6]: the maximum of its first and of partials' [programs, 8] first column, and sums of the others.

    float64, because a count of 2^24 and more is no float32. One program adds in one order, so that bits repeat.
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
    """(x [M, K], codes, scales, second [1], kept float64 [6]) -> nothing: kept takes the statistics in.

    codes, scales and second are None where `codes.scaling` needs none.
    """
    rows, columns = shape
    block_m, block_k = _TILE
    tiles_k, tiles_m = ceil_div(columns, block_k), ceil_div(rows, block_m)
    tiles = max(1, min(16, tiles_m * tiles_k // 1056))  # eight programs or more for each of 132 processors
    programs = ceil_div(tiles_m, tiles) * tiles_k
    measure = Launch(
        statistics_kernel,
        (programs, 1, 1),
        (Output((programs, 8), "float32"),),
        (rows, columns, *strides, *codes.strides),
        (codes.scaling, codes.packed, *codes.block, codes.greatest, codes.beyond, block_m, block_k, tiles),
        warps=4,
    )
    add = Launch(add_statistics, (1, 1, 1), (), (programs,), (_ADDED,), warps=4, in_place=(1,))
    steps = (
        Step(measure, ("x", "codes", "scales", "second"), ("partials",)),
        Step(add, ("partials", "kept"), ()),
    )
    return Program(("x", "codes", "scales", "second", "kept"), steps, ())


_TILE = (16, 128)
_ADDED = 256  # rows of partial results that are added at a time

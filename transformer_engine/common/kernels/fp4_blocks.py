"""FP4 blocks with 16 elements: their codes, their scales, and the "4over6" choice between two codings.

4over6 codes every block twice, with its maximum mapped to 6 and to 4, and selects the coding with the smaller error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX
from ..quantize_spec import FAST_MAE, FAST_MSE, MAE, MSE
from .rounding import as_float, to_compared_scale_codes, to_scale_codes, to_values

BLOCK = 16
GROUP = tl.constexpr(BLOCK)
LARGEST = tl.constexpr(FLOAT32_MAX)
# Even numbers: squared differences; above 2: in units of the second-level scale.
ERRORS = {"": 0, MAE: 1, MSE: 2, FAST_MAE: 3, FAST_MSE: 4}


@triton.jit
def encode_codes(scaled, random, STOCHASTIC: tl.constexpr):
    """Encode float32 values to E2M1: nearest, ties to even, or floor(|x| + random * gap); NaN becomes +6."""
    number = scaled == scaled
    magnitude = tl.where(number, tl.abs(scaled), 6.0)
    if STOCHASTIC:
        first = tl.where(magnitude > 2.0, 2.0, magnitude) * 2.0
        second = tl.where(magnitude > 4.0, 4.0, tl.where(magnitude < 2.0, 2.0, magnitude)) - 2.0
        third = (
            tl.where(magnitude > 6.0, 6.0, tl.where(magnitude < 4.0, 4.0, magnitude)) - 4.0
        ) * 0.5
        floors = tl.floor(first) + tl.floor(second) + tl.floor(third)
        fraction = (
            (first - tl.floor(first)) + (second - tl.floor(second)) + (third - tl.floor(third))
        )
        code = (floors + tl.floor(fraction + random)).to(tl.int32)
    else:
        # The midpoints between adjacent magnitudes; a tie is rounded to the even code.
        code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
        code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
        code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
        code += (magnitude > 5.0).to(tl.int32)
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    return code | tl.where(number, sign, 0)


@triton.jit
def decode_codes(code):
    """Decode E2M1 codes to float32 values."""
    index = (code & 7).to(tl.float32)
    magnitude = tl.where(
        index < 4.0, index * 0.5, tl.where(index < 6.0, index - 2.0, index * 2.0 - 8.0)
    )
    return tl.where(code > 7, -magnitude, magnitude)


@triton.jit
def compute_encode_scale(amax, RANGE: tl.constexpr):
    """Compute RANGE / amax, at most the largest float32; 1 if amax or the quotient is 0."""
    scale = tl.div_rn(RANGE, amax)
    scale = tl.where(scale > LARGEST, LARGEST, scale)
    return tl.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


@triton.jit
def as_block_scale(wanted, LIMIT: tl.constexpr, CONVERSION: tl.constexpr):
    return to_scale_codes(tl.where(wanted > LIMIT, LIMIT, wanted), tl.float8e4nv, CONVERSION)


@triton.jit
def scaled_blocks(
    x,
    block_scale,
    encode_scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Multiply x [ROWS, COLUMNS] by the multipliers of its blocks, as [ROWS, COLUMNS / 16, 16]."""
    multiplier = tl.div_rn(1.0, to_values(block_scale, CONVERSION) * tl.div_rn(1.0, encode_scale))
    multiplier = tl.where(multiplier > LARGEST, LARGEST, multiplier)
    return x.to(tl.float32).reshape(ROWS, COLUMNS // GROUP, GROUP) * multiplier[:, :, None]


@triton.jit
def halves(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Split x [ROWS, GROUPS, WIDTH] into the even and the odd elements along the last axis."""
    return tl.split(x.reshape(ROWS, GROUPS, WIDTH // 2, 2))


@triton.jit
def sum_in_order(x, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Sum x [ROWS, GROUPS, 16] over the last axis, from the first element to the last, to [ROWS, GROUPS]."""
    even, odd = halves(x, ROWS, GROUPS, 16)
    a, c = halves(even, ROWS, GROUPS, 8)  # elements 0 4 8 12 and 2 6 10 14
    b, d = halves(odd, ROWS, GROUPS, 8)
    a, e = halves(a, ROWS, GROUPS, 4)  # 0 8 and 4 12
    c, g = halves(c, ROWS, GROUPS, 4)
    b, f = halves(b, ROWS, GROUPS, 4)
    d, h = halves(d, ROWS, GROUPS, 4)
    x0, x8 = halves(a, ROWS, GROUPS, 2)
    x1, x9 = halves(b, ROWS, GROUPS, 2)
    x2, x10 = halves(c, ROWS, GROUPS, 2)
    x3, x11 = halves(d, ROWS, GROUPS, 2)
    x4, x12 = halves(e, ROWS, GROUPS, 2)
    x5, x13 = halves(f, ROWS, GROUPS, 2)
    x6, x14 = halves(g, ROWS, GROUPS, 2)
    x7, x15 = halves(h, ROWS, GROUPS, 2)
    total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7 + x8 + x9 + x10 + x11 + x12 + x13 + x14 + x15
    return total.reshape(ROWS, GROUPS)


@triton.jit
def sum_of_rows(x, TILES: tl.constexpr, GROUPS: tl.constexpr):
    """Sum every 16 rows of x [16 TILES, GROUPS] to [TILES, GROUPS], as a tree: rows 0 + 8, 1 + 9, .., then 0 + 4, .."""
    first, second = tl.split(x.reshape(TILES, 2, 8, GROUPS).permute(0, 2, 3, 1))
    first, second = tl.split((first + second).reshape(TILES, 2, 4, GROUPS).permute(0, 2, 3, 1))
    first, second = tl.split((first + second).reshape(TILES, 2, 2, GROUPS).permute(0, 2, 3, 1))
    first, second = tl.split((first + second).reshape(TILES, 2, 1, GROUPS).permute(0, 2, 3, 1))
    return (first + second).reshape(TILES, GROUPS)


@triton.jit
def block_error(
    x,
    block_scale,
    amax,
    encode_scale,
    RANGE: tl.constexpr,
    ERROR: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute the error [ROWS, COLUMNS / 16] of coding x's blocks with these scales; ERROR is one of `ERRORS`."""
    scaled = scaled_blocks(x, block_scale, encode_scale, ROWS, COLUMNS, CONVERSION)
    values = (
        decode_codes(encode_codes(scaled, scaled, False))
        * to_values(block_scale, CONVERSION)[:, :, None]
    )
    exact = x.to(tl.float32).reshape(ROWS, COLUMNS // GROUP, GROUP)
    if PER_ROW:
        amax, encode_scale = amax[:, :, None], encode_scale[:, :, None]
    if ERROR > 2:
        difference = values - exact * encode_scale
    else:
        difference = tl.div_rn(values * amax, RANGE) - exact
    terms = difference * difference if ERROR % 2 == 0 else tl.abs(difference)
    return sum_in_order(terms, ROWS, COLUMNS // GROUP)


@triton.jit
def _candidate(wanted, CONVERSION: tl.constexpr):
    limited = tl.where(wanted > 448.0, 448.0, wanted)
    return to_compared_scale_codes(limited, tl.float8e4nv, CONVERSION)


@triton.jit
def candidates(bits, encode_scale, CONVERSION: tl.constexpr):
    """Compute scales for blocks whose maximum maps to 6, and to 4; bits encode the blocks' maxima."""
    base = tl.div_rn(as_float(bits), 6.0) * encode_scale
    return _candidate(base, CONVERSION), _candidate(base * 1.5, CONVERSION)


@triton.jit
def takes_four(
    x,
    bits,
    amax,
    RANGE: tl.constexpr,
    ERROR: tl.constexpr,
    PER_ROW: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute int32 [ROWS, COLUMNS / 16], for square tiles [ROWS / 16, ..]: 1 where mapping the maximum to 4 wins."""
    encode_scale = compute_encode_scale(amax, RANGE)
    six, four = candidates(bits, encode_scale, CONVERSION)
    error_six = block_error(
        x, six, amax, encode_scale, RANGE, ERROR, PER_ROW, ROWS, COLUMNS, CONVERSION
    )
    error_four = block_error(
        x, four, amax, encode_scale, RANGE, ERROR, PER_ROW, ROWS, COLUMNS, CONVERSION
    )
    if SQUARE:
        error_six = sum_of_rows(error_six, ROWS // GROUP, COLUMNS // GROUP)
        error_four = sum_of_rows(error_four, ROWS // GROUP, COLUMNS // GROUP)
    return (error_four < error_six).to(tl.int32)

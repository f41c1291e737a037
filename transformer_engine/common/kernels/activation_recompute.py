"""An activation's dx, and the transposed FP8 codes [width, M] of its output f(x), which the same tiles of x determine.

The weight gradient of the product that reads f(x) needs these codes. Computed here, they are not in memory between
the forward and the backward pass, and x is read no more often than for dx alone.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import Element
from . import tile
from .activation import CURVES, curve, curve_and_slope, gated, gated_gradients
from .activation_cast import MEASURED, backward_tile, load_tile, made, store_tile, tile_layout
from .cast import resolve_multiplier
from .conversion import NATIVE
from .launch import Launch, Output, codes_dtype
from .norm import load_multiplier, maximum_before, record_maximum
from .program import Program, step
from .rounding import to_codes

_BLOCK = tl.constexpr(128)  # columns in a block of encoded x; a multiple of a tile's columns


class OutputCodes(NamedTuple):
    """Transposed f(x) codes: their element, and how a scale is computed from an amax.

    Attributes:
        element: Code element type.
        power_of_two: Whether the scale is a power of two.
        epsilon: Lower bound of the amax before the scale is computed.
    """

    element: Element
    power_of_two: bool
    epsilon: float


@triton.jit
def _decode_block(codes, scale, M, first_m, first_n, rows, element: tl.constexpr):
    """Decode one block of 128 columns, rounded; scales [M, blocks] are column-major."""
    pointers = scale + (first_n // _BLOCK) * M + first_m + rows
    factor = tl.load(pointers, mask=first_m + rows < M, other=0.0)
    return (codes * factor[:, None]).to(element).to(tl.float32)


@triton.jit
def _gradients_and_output(
    dy,
    x,
    x_scale,
    M,
    width,
    dy_stride,
    x_stride,
    first_m,
    first_n,
    rows,
    column,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute (da, db, f(x)), rounded; without a second half, da twice."""
    element = dy.dtype.element_ty
    gradient = load_tile(dy, M, width, dy_stride, first_m, first_n, rows, column, EVEN)
    a = load_tile(x, M, width, x_stride, first_m, first_n, rows, column, EVEN)
    if x_scale is not None:
        a = _decode_block(a, x_scale, M, first_m, first_n, rows, element)
    if GATED:
        b = load_tile(x + width, M, width, x_stride, first_m, first_n, rows, column, EVEN)
        if x_scale is not None:
            b = _decode_block(b, x_scale, M, first_m, first_n + width, rows, element)
        wide_da, wide_db = gated_gradients(gradient, a, b, limit, alpha, offset, CURVE)
        da = wide_da.to(element)
        db = wide_db.to(element)
        output = gated(a, b, limit, alpha, offset, CURVE)
    else:
        _, slope = curve_and_slope(a, CURVE)
        da = (gradient * slope).to(element)
        db = da
        output = curve(a, CURVE)
    return da, db, output.to(element)


@triton.jit
def recompute_kernel(
    dy,
    x,
    x_scale,
    multiplier,
    output_multiplier,
    output_amax,
    amax,
    codes,
    codes_t,
    scale,
    dx,
    output_codes_t,
    output_scale,
    M,
    width,
    dy_stride,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute one tile of dx [M, width], of dx's second half if gated, and of the f(x) codes [width, M]."""
    program = tl.program_id(0)
    factor = load_multiplier(multiplier, scale, program, False)
    output_factor = resolve_multiplier(
        program, output_multiplier, output_amax, output_scale, MAXIMUM, EPSILON, POWER_OF_TWO, False
    )
    current = maximum_before(amax)
    tile_m, tile_n = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(width, BLOCK_N), BAND)
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, BLOCK_N)
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    columns = 2 * width if GATED else width
    even, even_b, even_output = _gradients_and_output(
        dy,
        x,
        x_scale,
        M,
        width,
        dy_stride,
        x_stride,
        first_m,
        first_n,
        half * 2,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    odd, odd_b, odd_output = _gradients_and_output(
        dy,
        x,
        x_scale,
        M,
        width,
        dy_stride,
        x_stride,
        first_m,
        first_n,
        half * 2 + 1,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    pairs = tl.join(even_output, odd_output).to(tl.float32) * output_factor
    pairs = to_codes(pairs, output_codes_t.dtype.element_ty, CONVERSION)
    tile.store_pairs_transposed(
        output_codes_t, M, width, first_m, first_n, half, column, pairs, PAIRS, EVEN
    )
    bits = store_tile(
        even,
        odd,
        dx,
        codes,
        codes_t,
        M,
        width,
        columns,
        0,
        first_m,
        first_n,
        half,
        column,
        factor,
        PAIRS,
        EVEN,
        CONVERSION,
    )
    if GATED:
        bits_b = store_tile(
            even_b,
            odd_b,
            dx,
            codes,
            codes_t,
            M,
            width,
            columns,
            width,
            first_m,
            first_n,
            half,
            column,
            factor,
            PAIRS,
            EVEN,
            CONVERSION,
        )
        bits = tl.maximum(bits, bits_b)
    if amax is not None:
        record_maximum(amax, tl.max(bits), current)


def backward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: str,
    constants: tuple[float, float, float],
    element: Element | None,
    columnwise: bool,
    output: OutputCodes,
    encoded: bool = False,
) -> Program:
    """Program for dx [M, N] and the output's codes; N is 2 * width if gated.

    Inputs: dy [M, width] and x with the given strides, multiplier and record float32 [1] for dx's codes or None,
    multiplier and amax float32 [1] for the output's codes, one of which is None. Results: codes [M, N], scale, codes_t
    [N, M] or None, its scale, amax of dx; without an element for dx's codes, dx [M, N] and its amax; then the output's
    codes_t [width, M] and scale. If x is `encoded`, it is FP8 codes, whose scales float32 [M, N / 128], column-major,
    follow x in the inputs; width is then a multiple of 128.
    """
    rows, width = shape
    # The tile from `activation_cast` for codes in both directions.
    block, warps = backward_tile(rows * width, name, gated, columnwise=True, sums_columns=False)
    tiling, grid = tile_layout(shape, block)
    outputs = (
        *((MEASURED,) if element is None else ()),
        *made((rows, 2 * width if gated else width), dtype, element, columnwise),
        Output((width, rows), codes_dtype(output.element)),
        Output((1,), "float32"),
    )
    scaling = (output.element.maximum, output.epsilon, output.power_of_two)
    scalars, fixed = (
        (*shape, *strides, *constants),
        (CURVES[name], gated, *scaling, *tiling, NATIVE),
    )
    recorded = () if element is None else (6,)
    launch = Launch(recompute_kernel, grid, outputs, scalars, fixed, warps, in_place=recorded)
    names = ("codes", "codes_t", "scale", "values", *_OUTPUT)
    of_output = ("output_multiplier", "output_amax")
    matrices = ("dy", "x", "x_scale") if encoded else ("dy", "x")
    read = (*matrices, None)[:3]
    if element is None:
        first = step(launch, (*read, None, *of_output), ("amax", *names))
        return Program((*matrices, *of_output), (first,), ("values", "amax", *_OUTPUT))
    first = step(launch, (*read, "multiplier", *of_output, "record"), names)
    columns = ("codes_t", "scale") if columnwise else (None, None)
    inputs = (*matrices, "multiplier", "record", *of_output)
    return Program(inputs, (first,), ("codes", "scale", *columns, "record", *_OUTPUT))


_OUTPUT = ("output_codes_t", "output_scale")

"""f(x) or dx as FP8 codes [M, N], as their transpose [N, M], or as values [M, N], with max|y| and column sums.

Every value is rounded to x's dtype first, so that the codes equal the result of separate operations. A tile's even and
odd rows are computed separately, so that pairs of codes cross the shared memory as one word (see `tile`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from . import tile
from .activation import CURVES, curve, curve_and_slope, gated, gated_gradients
from .conversion import NATIVE
from .launch import Launch, Output, codes_dtype
from .norm import load_multiplier, maximum_before, record_maximum
from .rounding import magnitude_bits, to_codes


@triton.jit
def store_tile(
    even,
    odd,
    y,
    codes,
    codes_t,
    M,
    width,
    stride,
    shift,
    first_m,
    first_n,
    half,
    column,
    factor,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store the tile whose rows 2 half and 2 half + 1 are `even` and `odd`; return the int32 bits of its magnitudes.

    The tile belongs to the columns shift .. shift + width of matrices [M, stride].
    """
    if y is not None:
        _store(y + shift, M, width, stride, first_m, first_n, half * 2, column, even, EVEN)
        _store(y + shift, M, width, stride, first_m, first_n, half * 2 + 1, column, odd, EVEN)
    if codes is not None:
        element = codes.dtype.element_ty
        narrow = to_codes(even.to(tl.float32) * factor, element, CONVERSION)
        _store(codes + shift, M, width, stride, first_m, first_n, half * 2, column, narrow, EVEN)
        narrow = to_codes(odd.to(tl.float32) * factor, element, CONVERSION)
        _store(
            codes + shift, M, width, stride, first_m, first_n, half * 2 + 1, column, narrow, EVEN
        )
    if codes_t is not None:
        pairs = to_codes(
            tl.join(even, odd).to(tl.float32) * factor, codes_t.dtype.element_ty, CONVERSION
        )
        rows_of_half = codes_t + tl.cast(shift, tl.int64) * M
        tile.store_pairs_transposed(
            rows_of_half, M, width, first_m, first_n, half, column, pairs, PAIRS, EVEN
        )
    return tl.maximum(magnitude_bits(even), magnitude_bits(odd))


@triton.jit
def _store(matrix, M, width, stride, first_m, first_n, rows, column, values, EVEN: tl.constexpr):
    inside = (first_m + rows < M)[:, None] & (first_n + column < width)[None, :]
    pointers = matrix + (first_m * stride + first_n) + (rows[:, None] * stride + column[None, :])
    tile.store(pointers, values, inside, EVEN)


@triton.jit
def load_tile(matrix, M, width, stride, first_m, first_n, rows, column, EVEN: tl.constexpr):
    """Load float32 elements (first_m + rows, first_n + column) of [M, width], 0 outside; `stride` is the row stride."""
    pointers = matrix + (first_m * stride + first_n) + (rows[:, None] * stride + column[None, :])
    inside = (first_m + rows < M)[:, None] & (first_n + column < width)[None, :]
    return tile.load(pointers, inside, EVEN).to(tl.float32)


@triton.jit
def activated(
    x,
    M,
    width,
    stride,
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
    a = load_tile(x, M, width, stride, first_m, first_n, rows, column, EVEN)
    if GATED:
        b = load_tile(x + width, M, width, stride, first_m, first_n, rows, column, EVEN)
        result = gated(a, b, limit, alpha, offset, CURVE)
    else:
        result = curve(a, CURVE)
    return result.to(x.dtype.element_ty)


@triton.jit
def forward_kernel(
    x,
    multiplier,
    amax,
    codes,
    codes_t,
    scale,
    y,
    M,
    width,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute a tile of y [M, width]."""
    program = tl.program_id(0)
    factor = load_multiplier(multiplier, scale, program, ZERO_IS_ONE)
    current = maximum_before(amax)
    tile_m, tile_n = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(width, BLOCK_N), BAND)
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, BLOCK_N)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    even = activated(
        x,
        M,
        width,
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
    odd = activated(
        x,
        M,
        width,
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
    bits = store_tile(
        even,
        odd,
        y,
        codes,
        codes_t,
        M,
        width,
        width,
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
    if amax is not None:  # every curve maps the 0 outside the matrix to 0
        record_maximum(amax, tl.max(bits), current)


@triton.jit
def gradients(
    dy,
    x,
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
    """Compute (da, db), rounded; without a second half, da twice."""
    gradient = load_tile(dy, M, width, dy_stride, first_m, first_n, rows, column, EVEN)
    if CURVE == "identity":
        da = gradient.to(dy.dtype.element_ty)
        db = da
    else:
        element = x.dtype.element_ty
        a = load_tile(x, M, width, x_stride, first_m, first_n, rows, column, EVEN)
        if GATED:
            b = load_tile(x + width, M, width, x_stride, first_m, first_n, rows, column, EVEN)
            wide_da, wide_db = gated_gradients(gradient, a, b, limit, alpha, offset, CURVE)
            da = wide_da.to(element)
            db = wide_db.to(element)
        else:
            _, slope = curve_and_slope(a, CURVE)
            da = (gradient * slope).to(element)
            db = da
    return da, db


@triton.jit
def store_column_sums(workspace, sums, strip, N, first_n, column, width):
    """Store the sums over a strip's rows in workspace [strips, N]."""
    inside = first_n + column < width
    tl.store(workspace + strip.to(tl.int64) * N + first_n + column, tl.sum(sums, 0), mask=inside)


@triton.jit
def backward_kernel(
    dy,
    x,
    multiplier,
    amax,
    codes,
    codes_t,
    scale,
    dx,
    workspace,
    M,
    width,
    dy_stride,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Compute a strip of TILES tiles in dx [M, width], and if gated the same strip in dx's second half.

    "identity": dx = dy. Column sums are accumulated over a whole strip: a reduction per tile costs as much as the tile.
    """
    program = tl.program_id(0)
    factor = load_multiplier(multiplier, scale, program, ZERO_IS_ONE)
    current = maximum_before(amax)
    strip, tile_n = tile.position(
        program, tl.cdiv(M, BLOCK_M * TILES), tl.cdiv(width, BLOCK_N), BAND
    )
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, BLOCK_N)
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    columns = 2 * width if GATED else width
    greatest = 0
    if workspace is not None:
        sums = tl.zeros([BLOCK_M // 2, BLOCK_N], tl.float32)
        sums_b = tl.zeros([BLOCK_M // 2, BLOCK_N], tl.float32)
    for index in range(TILES):
        first_m = (strip * TILES + index).to(tl.int64) * BLOCK_M
        even, even_b = gradients(
            dy,
            x,
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
        odd, odd_b = gradients(
            dy,
            x,
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
        if workspace is not None:
            sums += even.to(tl.float32) + odd.to(tl.float32)
        if GATED:
            other_half = store_tile(
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
            bits = tl.maximum(bits, other_half)
            if workspace is not None:
                sums_b += even_b.to(tl.float32) + odd_b.to(tl.float32)
        if amax is not None:
            greatest = tl.maximum(greatest, tl.max(bits))
    if workspace is not None:
        store_column_sums(workspace, sums, strip, columns, first_n, column, width)
        if GATED:
            store_column_sums(workspace + width, sums_b, strip, columns, first_n, column, width)
    if amax is not None:
        record_maximum(amax, greatest, current)


def forward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    dtype: str,
    constants: tuple[float, float, float],
    element: Element | None,
    columnwise: bool,
    *,
    measures: bool = False,
    zero_is_one: bool = False,
) -> Launch:
    """Launch that computes f(x).

    Inputs: x, code multiplier float32 [1] or None, amax float32 [1] or None, which becomes max(amax, max|y|).
    Outputs: codes [M, width], codes_t [width, M] if columnwise, scale float32 [1], None; without an element for codes,
    only the last: y [M, width].

    Args:
        measures: The first output is amax instead.
        zero_is_one: Read a zero multiplier as 1.
    """
    tile, warps = _forward_tile(shape[0] * shape[1], gated, columnwise)
    tiling, grid = tile_layout(shape, tile)
    outputs = made(shape, dtype, element, columnwise)
    if measures:
        outputs = (MEASURED, *outputs)
    scalars = (*shape, x_stride, *constants)
    fixed = (CURVES[name], gated, zero_is_one, *tiling, NATIVE)
    recorded = () if measures else (2,)
    return Launch(forward_kernel, grid, outputs, scalars, fixed, warps, in_place=recorded)


def backward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: str,
    constants: tuple[float, float, float],
    element: Element | None,
    columnwise: bool,
    sums_columns: bool,
    *,
    measures: bool = False,
    zero_is_one: bool = False,
) -> Launch:
    """Launch that computes dx [M, N]; N is 2 * width if gated. "identity": x is None, dx is dy.

    Inputs: dy [M, width] and x with the given strides, then multiplier and amax as in `forward`. Outputs: as in
    `forward`, then float32 column sums [strips, N] if requested; with `measures`, amax comes first.
    """
    rows, width = shape
    tile, warps = backward_tile(rows * width, name, gated, columnwise, sums_columns)
    tiling, grid = tile_layout(shape, tile)
    columns = 2 * width if gated else width
    outputs = (
        *((MEASURED,) if measures else ()),
        *made((rows, columns), dtype, element, columnwise),
        Output((ceil_div(rows, tile[0] * tile[3]), columns), "float32") if sums_columns else None,
    )
    curve = "identity" if name == "identity" else CURVES[name]
    scalars = (*shape, *strides, *constants)
    fixed = (curve, gated, zero_is_one, *tiling, tile[3], NATIVE)
    recorded = () if measures else (3,)
    return Launch(backward_kernel, grid, outputs, scalars, fixed, warps, in_place=recorded)


MEASURED = Output((1,), "float32", begins=0.0)


def made(
    shape: tuple[int, int], dtype: str, element: Element | None, columnwise: bool
) -> tuple[Output | None, ...]:
    """Outputs (codes, codes_t, scale, None), or (None, None, None, result) without an element."""
    if element is None:
        return None, None, None, Output(shape, dtype)
    codes = Output(shape, codes_dtype(element))
    codes_t = Output(shape[::-1], codes.dtype) if columnwise else None
    return codes, codes_t, Output((1,), "float32"), None


def tile_layout(
    shape: tuple[int, int], tile: tuple[int, int, int, int]
) -> tuple[tuple[int, int, int, bool, bool], tuple[int, int, int]]:
    """Tiling (rows, columns, tiles per band, whether M is even, whether tiles are complete) and the grid."""
    rows, width = shape
    block_m, block_n, band, tiles = tile
    even = rows % (block_m * tiles) == 0 and width % block_n == 0
    grid = (ceil_div(rows, block_m * tiles) * ceil_div(width, block_n), 1, 1)
    return (block_m, block_n, band, rows % 2 == 0, even), grid


# Tiles are (rows, columns, tiles per band, tiles per strip); times are for [8192, 14336] outputs on an H200, in ms.
_SMALL = (64, 64, 4, 1), 4


def _forward_tile(
    size: int, gated: bool, columnwise: bool
) -> tuple[tuple[int, int, int, int], int]:
    """Tile and warps for a program that computes `size` elements."""
    if size <= 1 << 22:
        return _SMALL
    if not columnwise:
        return (16, 512, 1, 1), 8  # swiglu 0.144, gelu 0.124; 4 to 64 rows alike
    if gated:
        return (64, 128, 4, 1), 8  # swiglu 0.188; 64 x 64 0.198, 64 x 256 0.216, 128 x 64 0.198
    return (64, 64, 4, 1), 4  # gelu 0.147; 64 x 128 0.152, 64 x 256 0.169, 128 x 64 0.156


def backward_tile(
    size: int, name: str, gated: bool, columnwise: bool, sums_columns: bool
) -> tuple[tuple[int, int, int, int], int]:
    """Tile and warps for a program that reads `size` elements of dy."""
    if size <= 1 << 22:
        return _SMALL
    if sums_columns and columnwise and name == "identity":
        return (64, 128, 4, 1), 4  # a cast 0.147; 64 x 64 0.161, in strips of 4 0.153
    if sums_columns and columnwise:
        return (
            64,
            64,
            4,
            1,
        ), 4  # swiglu 0.385, gelu 0.230; strips of 4 0.493, 0.268; 64 x 128 0.471, 0.264
    if sums_columns:
        return (
            32,
            64,
            4,
            8,
        ), 4  # swiglu 0.310, gelu 0.198, a cast 0.110; 64 x 64 alone 0.315, 0.205, 0.141
    if not columnwise:
        return (16, 512, 1, 1), 8  # swiglu 0.221; 64 x 128 0.224, 32 x 512 0.337
    if gated:
        return (
            32,
            128,
            4,
            1,
        ), 8  # swiglu 0.299; 32 x 64 0.315, 32 x 256 0.340, 64 x 64 0.353, 64 x 128 0.368
    return (32, 128, 4, 1), 4  # gelu 0.197; 32 x 256 0.198, 64 x 64 0.216, with 8 warps 0.220

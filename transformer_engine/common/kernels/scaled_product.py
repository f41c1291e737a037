"""out [M, N] = a [M, K] @ b [N, K].T from codes with block scales.

MXFP8 and NVFP4 codes are multiplied by `tl.dot_scaled`: tcgen05.mma with scales in tensor memory on compute capability
10.x and 11.0, mma.sync with scales in registers on 12.x. Scales are swizzled (`swizzled_scales.py`), or they are the
exponents of float32 scales for 1x128 or 128x128 blocks.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .launch import Launch
from .product_parts import (
    NO_EPILOGUE,
    NO_TMA,
    ProductEpilogue,
    Side,
    TmaOptions,
    choose_tile,
    finish,
    finish_with_tma,
    is_swapped,
    scale_by_maxima,
)
from .swizzled_scales import descriptor_of_tiles, exponents_of_tile, load_scale_tile, scales_of_tile


@triton.jit
def product_kernel(
    a,
    b,
    scale_a,
    scale_b,
    level_a,
    level_b,
    bias,
    x,
    out,
    kept,
    M,
    N,
    K,
    LEADING_A,
    LEADING_B,
    ROW_A,
    COLUMN_A,
    ROW_B,
    COLUMN_B,
    ROW_STRIDE,
    COLUMN_STRIDE,
    RANGE,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LENGTH: tl.constexpr,
    PACKING: tl.constexpr,
    UNIT_A: tl.constexpr,
    UNIT_B: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute out [M, N] from codes a [M, K / PACKING] and b [N, K / PACKING] with a scale for LENGTH elements.

    Args:
        scale_a: Swizzled bytes, or float32 powers of two for UNIT_A > 0 rows and 128 columns, as in `block_kernel`.
        level_a: Tensor maximum [1], or row maxima [M] if ROWS_A, whose multiple by RANGE scales the sum; or None.
        RANGE: Factor for the product of both maxima.
        EVEN: K is a multiple of BLOCK_K.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K // PACKING)
    # Rows past the end are clamped rather than masked: their results are not stored.
    a_tile = a + (tl.minimum(m, M - 1).to(tl.int64)[:, None] * LEADING_A + k[None, :])
    b_tile = b + (tl.minimum(n, N - 1).to(tl.int64)[:, None] * LEADING_B + k[None, :])
    if PACKING == 2:
        scale_a = scale_a.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        scale_b = scale_b.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    columns: tl.constexpr = BLOCK_K // LENGTH
    tiles_c = tl.cdiv(tl.cdiv(K, LENGTH), 4)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        if EVEN:
            a_codes = tl.load(a_tile)
            b_codes = tl.load(b_tile)
        else:
            inside = (k < (K - block * BLOCK_K) // PACKING)[None, :]
            a_codes = tl.load(a_tile, mask=inside, other=0.0)
            b_codes = tl.load(b_tile, mask=inside, other=0.0)
        if UNIT_A > 0:
            a_scales = exponents_of_tile(
                scale_a, m, M, block, ROW_A, COLUMN_A, UNIT_A, BLOCK_M, columns
            )
            b_scales = exponents_of_tile(
                scale_b, n, N, block, ROW_B, COLUMN_B, UNIT_B, BLOCK_N, columns
            )
        else:
            a_scales = scales_of_tile(
                scale_a, tile_m * BLOCK_M, block * columns, tiles_c, BLOCK_M, columns, EVEN
            )
            b_scales = scales_of_tile(
                scale_b, tile_n * BLOCK_N, block * columns, tiles_c, BLOCK_N, columns, EVEN
            )
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
        a_tile += BLOCK_K // PACKING
        b_tile += BLOCK_K // PACKING
    if level_a is not None:
        total = scale_by_maxima(total, level_a, level_b, m, n, M, N, RANGE, ROWS_A, ROWS_B)
    finish(
        total,
        bias,
        x,
        out,
        kept,
        m,
        n,
        M,
        N,
        ROW_STRIDE,
        COLUMN_STRIDE,
        ALONG_ROWS,
        ACCUMULATE,
        ACTIVATION,
    )


@triton.jit
def tma_product_kernel(
    a,
    b,
    scale_a,
    scale_b,
    level_a,
    level_b,
    bias,
    x,
    out,
    kept,
    M,
    N,
    K,
    LEADING_A,
    LEADING_B,
    ROW_STRIDE,
    COLUMN_STRIDE,
    RANGE,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LENGTH: tl.constexpr,
    PACKING: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    TMA_RESULTS: tl.constexpr,
):
    """Compute `product_kernel` with swizzled scales; TMA loads operands and scales, with zeros past the end.

    Scales for fewer than 128 rows are part of a tile, and loaded through pointers. TMA_RESULTS: see `TmaOptions`.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    width: tl.constexpr = BLOCK_K // PACKING
    columns: tl.constexpr = BLOCK_K // LENGTH
    depth = K // PACKING
    a_tiles = tl.make_tensor_descriptor(
        a, [M, depth], [tl.cast(LEADING_A, tl.int64), 1], [BLOCK_M, width]
    )
    b_tiles = tl.make_tensor_descriptor(
        b, [N, depth], [tl.cast(LEADING_B, tl.int64), 1], [BLOCK_N, width]
    )
    if PACKING == 2:
        scale_a = scale_a.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        scale_b = scale_b.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    tiles_c = tl.cdiv(tl.cdiv(K, LENGTH), 4)
    a_scale_tiles = descriptor_of_tiles(scale_a, M, tiles_c, BLOCK_M, columns)
    if BLOCK_N >= 128:
        b_scale_tiles = descriptor_of_tiles(scale_b, N, tiles_c, BLOCK_N, columns)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        a_codes = a_tiles.load([first_m, block * width])
        b_codes = b_tiles.load([first_n, block * width])
        a_scales = load_scale_tile(a_scale_tiles, first_m, block * columns, BLOCK_M, columns)
        if BLOCK_N >= 128:
            b_scales = load_scale_tile(b_scale_tiles, first_n, block * columns, BLOCK_N, columns)
        else:
            b_scales = scales_of_tile(
                scale_b, first_n, block * columns, tiles_c, BLOCK_N, columns, False
            )
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    if level_a is not None:
        total = scale_by_maxima(total, level_a, level_b, m, n, M, N, RANGE, ROWS_A, ROWS_B)
    if TMA_RESULTS:
        finish_with_tma(
            total,
            bias,
            x,
            out,
            kept,
            first_m,
            first_n,
            M,
            N,
            ROW_STRIDE,
            ACCUMULATE,
            ACTIVATION,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        finish(
            total,
            bias,
            x,
            out,
            kept,
            m,
            n,
            M,
            N,
            ROW_STRIDE,
            COLUMN_STRIDE,
            ALONG_ROWS,
            ACCUMULATE,
            ACTIVATION,
        )


@functools.lru_cache(maxsize=4096)
def product(
    a: Side,
    b: Side,
    depth: int,
    out: int,
    dtype: str | None = None,
    *,
    length: int,
    packing: int = 1,
    factor: float = 1.0,
    epilogue: ProductEpilogue = NO_EPILOGUE,
    tma: TmaOptions = NO_TMA,
    swaps: bool = True,
) -> Launch:
    """Launch (left, right, their swizzled scales, maxima | None, bias | None, x | None) -> out, kept [M, N].

    The left operand is b and the right one a if `is_swapped`: a tile needs 128 rows in its left operand.

    Args:
        out: Elements from one result row to the next.
        length: Elements per scale.
        packing: Codes per byte.
        factor: Factor for the maxima's product. Sides with a `unit` have float32 scales instead of swizzled ones.
        epilogue: The operations after the product. The result that it is added to is an input after x.
        tma: The tensors that TMA moves; sides with a `unit` have none.
        swaps: A result with few rows is computed as its transpose, with another tile.
    """
    swapped = swaps and is_swapped(a.rows, b.rows)
    left, right = (b, a) if swapped else (a, b)
    strides = (1, out) if swapped else (out, 1)
    rows, columns, stages, warps = choose_tile(right.rows)
    step = 128 * packing
    units = () if tma.operands else (left.unit, right.unit)
    last = tma.results and not swapped if tma.operands else depth % step == 0
    constants = (
        left.element,
        right.element,
        length,
        packing,
        *units,
        left.levels > 1,
        right.levels > 1,
        swapped,
        epilogue.accumulates,
        epilogue.activation,
        rows,
        columns,
        step,
        8,
        stages,
        last,
    )
    float32_strides = () if tma.operands else (*left.strides, *right.strides)
    return Launch(
        tma_product_kernel if tma.operands else product_kernel,
        (ceil_div(left.rows, rows) * ceil_div(right.rows, columns), 1, 1),
        epilogue.outputs((a.rows, b.rows), dtype),
        (
            left.rows,
            right.rows,
            depth,
            left.leading,
            right.leading,
            *float32_strides,
            *strides,
            factor,
        ),
        constants,
        warps,
        in_place=(8,) if epilogue.accumulates else (),
    )


def exponent_product(
    a: Side,
    b: Side,
    depth: int,
    out: int,
    dtype: str | None = None,
    *,
    epilogue: ProductEpilogue = NO_EPILOGUE,
    swaps: bool = True,
) -> Launch:
    """Same as `product` for FP8 codes whose float32 scales for 1x128 or 128x128 blocks are powers of two."""
    return product(a, b, depth, out, dtype, length=32, epilogue=epilogue, swaps=swaps)

"""FP8 block codes for many matrices in one launch; the layout is the same as in `grouped_cast`, with scales per block.

Scales for 1 x 128 blocks are stored group by group, [ceil(K / 128), rows] for the row codes and [tiles, K] for the
transposed codes; scales for 128 x 128 blocks matrix by matrix.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from . import tile
from .block_cast import row_blocks_in_pairs
from .conversion import NATIVE
from .grouped_cast import address_tables, cast_codes, cast_grid, locate_program, store_transposed
from .grouped_layout import TILE_ROWS
from .launch import Launch, Output
from .rounding import as_float, magnitude_bits, scale_from_amax, to_codes

WIDTH = tl.constexpr(TILE_ROWS)


@triton.jit
def row_block_kernel(
    x,
    table,
    layout,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    TILES_K,
    GROUPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INFINITE: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize 1 x 128 blocks in row groups: along rows unless codes is None, along columns unless codes_t is."""
    group, matrix, rows, first_m, tile_k, start, first_tile, tiles = locate_program(
        tl.program_id(0), x, table, layout, M, K, TILES_K, GROUPS, True, WIDTH
    )
    if group < GROUPS:
        first_k = (tile_k * WIDTH).to(tl.int64)
        half = tl.arange(0, WIDTH // 2)
        k = tl.arange(0, WIDTH)
        even = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2, k, False)
        odd = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2 + 1, k, False)
        if codes is not None:
            row_blocks_in_pairs(
                codes + start * K,
                scale + start * TILES_K,
                rows,
                K,
                first_m,
                first_k,
                half,
                k,
                even,
                odd,
                MAXIMUM,
                EPSILON,
                POWER_OF_TWO,
                INFINITE,
                False,
                CONVERSION,
            )
        if codes_t is not None:
            amax = as_float(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), 0))
            multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, INFINITE)
            row = scale_t + (first_tile + first_m // WIDTH) * K + first_k
            tile.store(row + k, decode, first_k + k < K, EVEN)
            pairs = tl.join(even, odd).to(tl.float32) * multiplier[None, :, None]
            store_transposed(
                codes_t,
                to_codes(pairs, codes_t.dtype.element_ty, CONVERSION),
                rows,
                K,
                first_m,
                first_k,
                half,
                k,
                start,
                first_tile,
                tiles,
                True,
                EVEN,
                TILED,
            )


@triton.jit
def square_block_kernel(
    x,
    table,
    layout,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    TILES_K,
    GROUPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INFINITE: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize 128 x 128 blocks in matrices [M, K] by address: scale [GROUPS, M tiles, K tiles], scale_t transposed."""
    _, matrix, rows, first_m, tile_k, start, first_tile, tiles = locate_program(
        tl.program_id(0), x, table, layout, M, K, TILES_K, GROUPS, False, WIDTH
    )
    first_k = (tile_k * WIDTH).to(tl.int64)
    tile_m = first_m // WIDTH
    half = tl.arange(0, WIDTH // 2)
    k = tl.arange(0, WIDTH)
    even = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2 + 1, k, EVEN)
    amax = as_float(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd))))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, INFINITE)
    if codes is not None:
        tl.store(scale + (first_tile + tile_m) * TILES_K + tile_k, decode)
        pointer = codes + start * K
        narrow = to_codes(even.to(tl.float32) * multiplier, codes.dtype.element_ty, CONVERSION)
        tile.store_rows(pointer, rows, K, first_m, first_k, half * 2, k, narrow, EVEN)
        narrow = to_codes(odd.to(tl.float32) * multiplier, codes.dtype.element_ty, CONVERSION)
        tile.store_rows(pointer, rows, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN)
    if codes_t is not None:
        tl.store(scale_t + first_tile * TILES_K + tile_k * tiles + tile_m, decode)
        pairs = to_codes(
            tl.join(even, odd).to(tl.float32) * multiplier, codes_t.dtype.element_ty, CONVERSION
        )
        store_transposed(
            codes_t,
            pairs,
            rows,
            K,
            first_m,
            first_k,
            half,
            k,
            start,
            first_tile,
            tiles,
            False,
            EVEN,
        )


@functools.lru_cache(maxsize=1024)
def row_blocks(
    shape: tuple[int, int],
    groups: int,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    value_for_inf: float,
    rowwise: bool,
    columnwise: bool,
    *,
    tiled: bool = False,
) -> Launch:
    """Launch (x [total, K], None, layout) -> codes, scale if rowwise, codes_t, scale_t if columnwise.

    Args:
        tiled: codes_t are [K, 128] for every tile of 128 rows.
    """
    grid, scalars, even = cast_grid(shape, groups, True, TILE_ROWS, TILE_ROWS)
    steps = (groups, element.maximum, epsilon, power_of_two, value_for_inf, even, tiled, NATIVE)
    codes, codes_t = cast_codes(shape, groups, True, element, rowwise, columnwise)
    scale = Output((shape[0] * ceil_div(shape[1], TILE_ROWS),), "float32") if rowwise else None
    scale_t = Output(None, "float32") if columnwise else None
    outputs = (codes, scale, codes_t, scale_t)
    return Launch(row_block_kernel, grid, outputs, scalars, steps, _warps(shape[1]))


@functools.lru_cache(maxsize=1024)
def square_blocks(
    shape: tuple[int, int],
    groups: int,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    value_for_inf: float,
    rowwise: bool,
    columnwise: bool,
) -> Launch:
    """Launch (a matrix [M, K] with even M, the table, None) -> codes, scale, codes_t, scale_t.

    codes and scale are present if rowwise, codes_t and scale_t if columnwise."""
    grid, scalars, even = cast_grid(shape, groups, False, TILE_ROWS, TILE_ROWS)
    steps = (groups, element.maximum, epsilon, power_of_two, value_for_inf, even, NATIVE)
    codes, codes_t = cast_codes(shape, groups, False, element, rowwise, columnwise)
    tiles = (ceil_div(shape[0], TILE_ROWS), ceil_div(shape[1], TILE_ROWS))
    outputs = (
        codes,
        Output((groups, *tiles), "float32") if rowwise else None,
        codes_t,
        Output((groups, *tiles[::-1]), "float32") if columnwise else None,
    )
    return Launch(
        square_block_kernel,
        grid,
        outputs,
        scalars,
        steps,
        _warps(shape[1]),
        tables=address_tables(False),
    )


def _warps(depth: int) -> int:
    """Warps for a tile with 128 x 128 values, whose single accesses spill 144 bytes per thread with 8 warps."""
    return 8 if depth % 16 == 0 else 16

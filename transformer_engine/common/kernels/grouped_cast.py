"""FP8 codes for many matrices in one launch: the consecutive row groups of one matrix, or matrices by address.

Every group is quantized bit for bit as in a separate launch: with its own scale and recorded maximum, or in its own
blocks (`grouped_block_cast`). Row codes keep the matrix's layout. Transposed codes are stored group by group, [K, rows
rounded up to 128] each, with zeros past the last row, so that a product along the rows needs no masks. Tiled codes are
[K, 128] per tile of 128 rows instead, as `grouped_product` reads them. A tensor holds the group positions; see
`grouped_layout`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import FLOAT32_MAX, Element, ceil_div
from . import tile
from .cast import _record
from .conversion import NATIVE
from .grouped_gemm import SCALE_SLOT, SLOT, matrix_base
from .grouped_layout import (
    TILE_ROWS,
    first_padding_row,
    group_of_tile,
    group_or_none,
    rows_of_group,
    tiles_at_most,
)
from .launch import READ, AddressTable, Launch, Output, codes_dtype
from .program import Program, ProgramStep, step
from .rounding import magnitude_bits, scale_from_amax, take_multiplier, to_codes

WIDTH = tl.constexpr(TILE_ROWS)
VALUE_FOR_INF = tl.constexpr(FLOAT32_MAX)


@triton.jit
def locate_program(
    program,
    x,
    table,
    layout,
    M,
    K,
    TILES_K,
    GROUPS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    HEIGHT: tl.constexpr,
    REST: tl.constexpr = False,
):
    """Locate a program.

    The place is: group, its matrix, its rows, first row and tile column of the program's tile, then the group's first
    row, first tile, and number of tiles.

    Args:
        HEIGHT: Rows in the program's tile, part of the 128 rows in a layout tile.
        REST: There is one tile more than the layout's, see `group_or_none`; M is the total row count.
    """
    if BY_ROWS:
        part = program // TILES_K
        tile_k = program % TILES_K
        tile_m = part // (WIDTH // HEIGHT)
        if REST:
            group = group_or_none(layout, tile_m, M // WIDTH + GROUPS + 1, GROUPS)
        else:
            group = group_of_tile(layout, tile_m, GROUPS)
        start, rows, first_tile, tiles = rows_of_group(
            layout, tl.minimum(group, GROUPS - 1), GROUPS
        )
        matrix = x + start.to(tl.int64) * K
        first_m = (tile_m - first_tile) * WIDTH + part % (WIDTH // HEIGHT) * HEIGHT
    else:
        parts = tl.cdiv(M, HEIGHT)
        group = program // (parts * TILES_K)
        within = program % (parts * TILES_K)
        tile_k = within // parts
        matrix = matrix_base(x, table, group, M.to(tl.int64) * K)
        first_m = within % parts * HEIGHT
        rows = M
        start = group * M
        tiles = tl.cdiv(M, WIDTH)
        first_tile = group * tiles
    return (
        group,
        matrix,
        rows,
        first_m.to(tl.int64),
        tile_k,
        start.to(tl.int64),
        first_tile.to(tl.int64),
        tiles,
    )


@triton.jit
def maximum_kernel(
    x,
    table,
    layout,
    amax,
    M,
    K,
    TILES_K,
    GROUPS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute amax[group] = max(amax[group], max|x|) over the group's elements, one tile per program."""
    group, matrix, rows, first_m, tile_k, _, _, _ = locate_program(
        tl.program_id(0), x, table, layout, M, K, TILES_K, GROUPS, BY_ROWS, BLOCK_M
    )
    if group < GROUPS:
        first_k = (tile_k * BLOCK_K).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        values = tile.load_rows(
            matrix, rows, K, first_m, first_k, m, tl.arange(0, BLOCK_K), EVEN and not BY_ROWS
        )
        _record(amax + group, tl.max(magnitude_bits(values)))


@triton.jit
def cast_kernel(
    x,
    table,
    layout,
    multiplier,
    amax,
    codes,
    codes_t,
    scale,
    M,
    K,
    TILES_K,
    STRIDE,
    OFFSET,
    GROUPS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    REST: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize with one multiplier per group; each row's first entry in scale [GROUPS, SLOT] is written.

    A given multiplier is at OFFSET + group * STRIDE, and amax at the same offset records max|x|. Otherwise, the
    multiplier is computed from amax[group]. With REST, rows after the last group, up to M, get codes with multiplier 1
    and do not contribute to a maximum.
    """
    program = tl.program_id(0)
    if program < GROUPS:
        _group_scale(
            program,
            multiplier,
            amax,
            scale,
            STRIDE,
            OFFSET,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            ZERO_IS_ONE,
            True,
        )
    group, matrix, rows, first_m, tile_k, start, first_tile, tiles = locate_program(
        program, x, table, layout, M, K, TILES_K, GROUPS, BY_ROWS, BLOCK_M, REST
    )
    if group < GROUPS:
        factor = _group_scale(
            group,
            multiplier,
            amax,
            scale,
            STRIDE,
            OFFSET,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            ZERO_IS_ONE,
            False,
        )
        first_k = (tile_k * BLOCK_K).to(tl.int64)
        half = tl.arange(0, BLOCK_M // 2)
        k = tl.arange(0, BLOCK_K)
        even = tile.load_rows(matrix, rows, K, first_m, first_k, half * 2, k, EVEN and not BY_ROWS)
        odd = tile.load_rows(
            matrix, rows, K, first_m, first_k, half * 2 + 1, k, EVEN and not BY_ROWS
        )
        if codes is not None:
            pointer = codes + start * K
            narrow = to_codes(even.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
            tile.store_rows(
                pointer, rows, K, first_m, first_k, half * 2, k, narrow, EVEN and not BY_ROWS
            )
            narrow = to_codes(odd.to(tl.float32) * factor, codes.dtype.element_ty, CONVERSION)
            tile.store_rows(
                pointer, rows, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN and not BY_ROWS
            )
        if codes_t is not None:
            pairs = to_codes(
                tl.join(even, odd).to(tl.float32) * factor, codes_t.dtype.element_ty, CONVERSION
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
                BY_ROWS,
                EVEN,
                TILED,
            )
        if multiplier is not None:
            bits = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)))
            _record(amax + OFFSET + group * STRIDE, bits)
    elif REST:
        _cast_padding(
            x, layout, codes, program, M, K, TILES_K, GROUPS, BLOCK_M, BLOCK_K, CONVERSION
        )


@triton.jit
def _cast_padding(
    x,
    layout,
    codes,
    program,
    M,
    K,
    TILES_K,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Convert x to codes, with multiplier 1, in a tile after the last group."""
    part = program // TILES_K
    row = (
        first_padding_row(layout, part // (WIDTH // BLOCK_M), GROUPS)
        + part % (WIDTH // BLOCK_M) * BLOCK_M
    )
    first_m, first_k = row.to(tl.int64), (program % TILES_K * BLOCK_K).to(tl.int64)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    values = tile.load_rows(x, M, K, first_m, first_k, m, k, False)
    narrow = to_codes(values.to(tl.float32), codes.dtype.element_ty, CONVERSION)
    tile.store_rows(codes, M, K, first_m, first_k, m, k, narrow, False)


@triton.jit
def _group_scale(
    group,
    multiplier,
    amax,
    scale,
    STRIDE,
    OFFSET,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ZERO_IS_ONE: tl.constexpr,
    STORES: tl.constexpr,
):
    """Multiplier for a group, given or computed from its amax; STORES: write its inverse."""
    if multiplier is not None:
        factor = take_multiplier(multiplier + OFFSET + group * STRIDE, ZERO_IS_ONE)
        decode = tl.div_rn(1.0, factor)
    else:
        factor, decode = scale_from_amax(
            tl.load(amax + group), MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF
        )
    if STORES:
        tl.store(scale + group * SLOT, decode)
    return factor


@triton.jit
def store_transposed(
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
    BY_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr = False,
):
    """Store a tile's codes in the group's [K, rows rounded up to 128], or in its [K, M] for equal-sized matrices.

    With TILED, every 128 rows of a group are stored as [K, 128].
    With EVEN, no tile column is past K and, for matrices, no row past M. Row groups need no mask along the rows,
    because they are rounded up; a mask would split the stores into single words.
    """
    if BY_ROWS:
        # Words in a row, and the first one. Triton would lose the alignment of a quotient.
        if TILED:
            first_tile += first_m // WIDTH
            words_in_row = WIDTH // 2
            first_word = first_m % WIDTH // 2
        else:
            words_in_row = tiles * (WIDTH // 2)
            first_word = first_m // 2
        low, high = tl.split(pairs)
        words = tl.trans(
            low.to(tl.uint8, bitcast=True).to(tl.uint16)
            | (high.to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
        )
        pointer = (codes_t + first_tile * WIDTH * K).to(tl.pointer_type(tl.uint16))
        corner = tl.multiple_of(pointer + (first_k * words_in_row + first_word), 16)
        places = corner + (k[:, None] * words_in_row + half[None, :])
        inside = tl.broadcast_to((first_k + k < K)[:, None], words.shape)
        tile.store(places, words, inside, EVEN)
    else:
        pointer = codes_t + start * K
        tile.store_pairs_transposed(pointer, rows, K, first_m, first_k, half, k, pairs, True, EVEN)


@functools.lru_cache(maxsize=1024)
def maximum(shape: tuple[int, int], groups: int, by_rows: bool) -> Launch:
    """Launch (x [total, K] or one matrix [M, K], table | None, layout | None) -> amax float32 [groups]."""
    block_m, block_k, warps = _MAXIMUM_TILE
    grid, scalars, even = cast_grid(shape, groups, by_rows, block_m, block_k)
    outputs = (Output((groups,), "float32", begins=0.0),)
    steps = (groups, by_rows, block_m, block_k, even)
    return Launch(
        maximum_kernel, grid, outputs, scalars, steps, warps, tables=address_tables(by_rows)
    )


@functools.lru_cache(maxsize=1024)
def cast(
    shape: tuple[int, int],
    groups: int,
    by_rows: bool,
    element: Element,
    stride: int,
    offset: int,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    *,
    records: bool,
    zero_is_one: bool = False,
    rest: bool = False,
    tiled: bool = False,
) -> Launch:
    """Launch (x, table | None, layout | None, multiplier | None, amax) -> codes, codes_t, scale [groups, 4].

    x is [total, K] or one of the matrices [M, K] with even M. codes is present if rowwise, codes_t if columnwise.

    Args:
        stride: The given multiplier and amax of group e are at offset + e * stride.
        offset: See stride.
        records: The multiplier is given, and amax becomes max(amax, max|x|); otherwise it is computed from amax.
        zero_is_one: Read a given zero multiplier as 1.
        rest: Also quantize the rows after the last group, with multiplier 1.
        tiled: codes_t are [K, 128] for every tile of 128 rows.
    """
    assert not (rest and (columnwise or not by_rows)), (
        "rows that are no group's have codes by rows alone"
    )
    block_m, block_k, warps = _CAST_TILE
    grid, scalars, even = cast_grid(shape, groups, by_rows, block_m, block_k)
    if rest:
        tiles_k = ceil_div(shape[1], block_k)
        grid, scalars = (grid[0] + TILE_ROWS // block_m * tiles_k, 1, 1), (shape[0], *scalars[1:])
    scale = (element.maximum, epsilon, power_of_two, zero_is_one)
    steps = (groups, by_rows, *scale, block_m, block_k, even, rest, tiled, NATIVE)
    codes, codes_t = cast_codes(shape, groups, by_rows, element, rowwise, columnwise)
    return Launch(
        cast_kernel,
        grid,
        (codes, codes_t, Output((groups, SCALE_SLOT), "float32")),
        (*scalars, stride, offset),
        steps,
        warps,
        in_place=(4,) if records else (),
        tables=address_tables(by_rows),
    )


def tensor_scaled(
    shape: tuple[int, int],
    groups: int,
    by_rows: bool,
    element: Element,
    power_of_two: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    slots: tuple[int, int] | None,
    tiled: bool = False,
) -> Program:
    """Program (x, table | None, layout | None, codes, codes_t, scale) with one scale per group.

    x is [total, K] or one of the matrices [M, K]; the caller allocates codes, codes_t and scale. The scale is computed
    from the group's maximum, unless `slots` are the stride and offset for given scales and their maxima; then the
    inputs are (x, table, layout, multiplier, amax, codes, codes_t, scale). See `cast` for tiled.
    """
    inputs, into = ("x", "table", "layout"), ("codes", "codes_t", "scale")
    plain = (shape, groups, by_rows, element)
    rest = (power_of_two, epsilon, rowwise, columnwise)
    if slots is not None:
        launch = cast(*plain, *slots, *rest, records=True, tiled=tiled)
        steps = (step(launch, (*inputs, "multiplier", "amax"), into),)
        inputs += ("multiplier", "amax")
    else:
        launch = cast(*plain, 0, 0, *rest, records=False, tiled=tiled)
        steps = (
            ProgramStep(maximum(shape, groups, by_rows), inputs, ("amax",)),
            step(launch, (*inputs, None, "amax"), into),
        )
    results = tuple(name for name in into if name in steps[-1].outputs)
    return Program(inputs, steps, (), results)


def address_tables(by_rows: bool) -> tuple[AddressTable, ...]:
    """Address table through which matrices are read; row groups need none."""
    return () if by_rows else (AddressTable(1, (READ,)),)


def cast_codes(
    shape: tuple[int, int],
    groups: int,
    by_rows: bool,
    element: Element,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Output | None, Output | None]:
    """Codes and transposed codes as outputs; the rounded-up row count depends on the groups."""
    dtype = codes_dtype(element)
    stack = () if by_rows else (groups,)
    return (
        Output((*stack, *shape), dtype) if rowwise else None,
        Output(None if by_rows else (*stack, *shape[::-1]), dtype) if columnwise else None,
    )


_MAXIMUM_TILE = (128, 128, 8)  # rows, columns, warps
_CAST_TILE = (128, 64, 8)


def cast_grid(
    shape: tuple[int, int], groups: int, by_rows: bool, block_m: int, block_k: int
) -> tuple[tuple[int, int, int], tuple[int, int, int], bool]:
    """Compute (grid, the kernels' scalars, whether every tile ends with the matrix's columns, and rows by address)."""
    rows, depth = shape
    tiles_k = ceil_div(depth, block_k)
    if by_rows:
        programs = tiles_at_most(rows, groups) * (TILE_ROWS // block_m) * tiles_k
        return (programs, 1, 1), (0, depth, tiles_k), depth % block_k == 0
    programs = groups * ceil_div(rows, block_m) * tiles_k
    even = rows % block_m == 0 and depth % block_k == 0
    return (programs, 1, 1), (rows, depth, tiles_k), even

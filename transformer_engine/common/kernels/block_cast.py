"""codes [M, K] = saturate(x * scale of its tile), 1 x 128 or 128 x 128 tiles; both directions from one read."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from . import tile
from .conversion import NATIVE
from .launch import Launch, Machine, Output, codes_dtype
from .rounding import as_float, magnitude_bits, scale_from_amax, to_codes

_WIDTH = 128
WIDTH = tl.constexpr(_WIDTH)


@triton.jit
def _row_blocks(
    codes,
    scale,
    M,
    K,
    first_m,
    first_k,
    rows,
    k,
    values,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store codes and scales for a tile's given rows; every row is one block."""
    amax = as_float(tl.max(magnitude_bits(values), 1))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    narrow = to_codes(
        values.to(tl.float32) * multiplier[:, None], codes.dtype.element_ty, CONVERSION
    )
    tile.store_rows(codes, M, K, first_m, first_k, rows, k, narrow, EVEN)
    tile.store(scale + (first_k // WIDTH * M + first_m) + rows, decode, first_m + rows < M, EVEN)


@triton.jit
def row_blocks_in_pairs(
    codes,
    scale,
    M,
    K,
    first_m,
    first_k,
    half,
    k,
    even,
    odd,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store codes and scales for a tile's rows 2 half, `even`, and 2 half + 1, `odd`; every row is one block."""
    _row_blocks(
        codes,
        scale,
        M,
        K,
        first_m,
        first_k,
        half * 2,
        k,
        even,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        EVEN,
        CONVERSION,
    )
    _row_blocks(
        codes,
        scale,
        M,
        K,
        first_m,
        first_k,
        half * 2 + 1,
        k,
        odd,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        EVEN,
        CONVERSION,
    )


@triton.jit
def tile_blocks(
    even,
    odd,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    first_m,
    first_k,
    half,
    k,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store 1 x 128 blocks of a tile whose rows 2 half and 2 half + 1 are `even` and `odd`, 0 outside [M, K].

    `codes` or `codes_t` can be None. Scales are [ceil(K/128), M] and, columnwise, [ceil(M/128), K]; the columnwise ones
    need a 128-row tile.
    """
    if codes is not None:
        row_blocks_in_pairs(
            codes,
            scale,
            M,
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
            VALUE_FOR_INF,
            EVEN,
            CONVERSION,
        )
    if codes_t is not None:
        amax = as_float(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), 0))
        multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
        tile.store(scale_t + (first_m // WIDTH * K + first_k) + k, decode, first_k + k < K, EVEN)
        pairs = to_codes(
            tl.join(even, odd).to(tl.float32) * multiplier[None, :, None],
            codes_t.dtype.element_ty,
            CONVERSION,
        )
        tile.store_pairs_transposed(codes_t, M, K, first_m, first_k, half, k, pairs, PAIRS, EVEN)


@triton.jit
def tile_square(
    even,
    odd,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    first_m,
    first_k,
    half,
    k,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store the tile as one 128 x 128 block: scale [ceil(M/128), ceil(K/128)], scale_t is its transpose."""
    tile_m, tile_k = first_m // WIDTH, first_k // WIDTH
    amax = as_float(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd))))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    if codes is not None:
        tl.store(scale + tile_m * tl.cdiv(K, WIDTH) + tile_k, decode)
        element = codes.dtype.element_ty
        narrow = to_codes(even.to(tl.float32) * multiplier, element, CONVERSION)
        tile.store_rows(codes, M, K, first_m, first_k, half * 2, k, narrow, EVEN)
        narrow = to_codes(odd.to(tl.float32) * multiplier, element, CONVERSION)
        tile.store_rows(codes, M, K, first_m, first_k, half * 2 + 1, k, narrow, EVEN)
    if codes_t is not None:
        tl.store(scale_t + tile_k * tl.cdiv(M, WIDTH) + tile_m, decode)
        pairs = to_codes(
            tl.join(even, odd).to(tl.float32) * multiplier, codes_t.dtype.element_ty, CONVERSION
        )
        tile.store_pairs_transposed(codes_t, M, K, first_m, first_k, half, k, pairs, PAIRS, EVEN)


@triton.jit
def row_block_kernel(
    x,
    codes,
    scale,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize 1 x 128 blocks along the rows only; scale [ceil(K/128), M]."""
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, WIDTH)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    first_m = (program // tiles_k * BLOCK_M).to(tl.int64)
    first_k = (program % tiles_k * WIDTH).to(tl.int64)
    values = tile.load_rows(x, M, K, first_m, first_k, m, k, EVEN)
    _row_blocks(
        codes,
        scale,
        M,
        K,
        first_m,
        first_k,
        m,
        k,
        values,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        EVEN,
        CONVERSION,
    )


@triton.jit
def _both_blocks_of_tile(
    program,
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    half, k = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH)
    tile_m, tile_k = tile.position(program, tl.cdiv(M, WIDTH), tl.cdiv(K, WIDTH), BAND)
    first_m = (tile_m * WIDTH).to(tl.int64)
    first_k = (tile_k * WIDTH).to(tl.int64)
    even = tile.load_rows(x, M, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(x, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    tile_blocks(
        even,
        odd,
        codes,
        scale,
        codes_t,
        scale_t,
        M,
        K,
        first_m,
        first_k,
        half,
        k,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        PAIRS,
        EVEN,
        CONVERSION,
    )


@triton.jit
def both_blocks_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize 1 x 128 blocks along the columns, and along the rows unless codes is None.

    scale is [ceil(K/128), M], scale_t [ceil(M/128), K]. Programs share full 128 x 128 tiles and load STAGES ahead.
    Unless EVEN, one program per tile: a loop keeps the offsets of all predicated accesses in registers, up to 5 KB per
    thread.
    """
    first = tl.program_id(0)
    if EVEN:
        tiles = tl.cdiv(M, WIDTH) * tl.cdiv(K, WIDTH)
        for program in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
            _both_blocks_of_tile(
                program,
                x,
                codes,
                scale,
                codes_t,
                scale_t,
                M,
                K,
                MAXIMUM,
                EPSILON,
                POWER_OF_TWO,
                VALUE_FOR_INF,
                BAND,
                PAIRS,
                EVEN,
                CONVERSION,
            )
    else:
        _both_blocks_of_tile(
            first,
            x,
            codes,
            scale,
            codes_t,
            scale_t,
            M,
            K,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            BAND,
            PAIRS,
            EVEN,
            CONVERSION,
        )


@triton.jit
def square_block_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize 128 x 128 blocks; scale [ceil(M/128), ceil(K/128)], scale_t is its transpose."""
    tiles_m = tl.cdiv(M, WIDTH)
    tiles_k = tl.cdiv(K, WIDTH)
    tile_m, tile_k = tile.position(tl.program_id(0), tiles_m, tiles_k, BAND)
    half = tl.arange(0, WIDTH // 2)
    k = tl.arange(0, WIDTH)
    first_m = (tile_m * WIDTH).to(tl.int64)
    first_k = (tile_k * WIDTH).to(tl.int64)
    even = tile.load_rows(x, M, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(x, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    tile_square(
        even,
        odd,
        codes,
        scale,
        codes_t,
        scale_t,
        M,
        K,
        first_m,
        first_k,
        half,
        k,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        PAIRS,
        EVEN,
        CONVERSION,
    )


class Blocks(NamedTuple):
    """Cast for a kernel's own result: as `row_blocks` (1 x 128), or as `square_blocks` if `square`."""

    element: Element
    columnwise: bool
    square: bool
    power_of_two: bool
    epsilon: float
    value_for_inf: float

    @property
    def steps(self) -> tuple[float, float, bool, float]:
        """The kernels' arguments MAXIMUM, EPSILON, POWER_OF_TWO and VALUE_FOR_INF."""
        return self.element.maximum, self.epsilon, self.power_of_two, self.value_for_inf


@functools.lru_cache(maxsize=4096)
def row_blocks(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    power_of_two: bool,
    epsilon: float,
    value_for_inf: float,
    machine: Machine,
) -> Launch:
    """Launch (x [M, K] contiguous) -> codes, scale [M, ceil(K/128)], codes_t, scale_t [K, ceil(M/128)].

    The last two need `columnwise`. Scale rows are contiguous, as the products with 1 x 128 blocks read them.
    """
    rows, depth = shape
    dtype = codes_dtype(element)
    tiles_m, tiles_k = ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH)
    by_rows = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((tiles_k, rows), "float32", transposed=True) if rowwise else None,
    )
    steps = (element.maximum, epsilon, power_of_two, value_for_inf)
    if not columnwise:
        # H200, 8192 x 14336 bfloat16 to e4m3: 32 rows and 8 warps 0.0873 ms, 64 0.0875, 128 0.0886.
        block_m = 32
        tiles = (block_m, rows % block_m == 0 and depth % _WIDTH == 0)
        grid = (ceil_div(rows, block_m) * tiles_k, 1, 1)
        return Launch(row_block_kernel, grid, by_rows, shape, (*steps, *tiles, NATIVE), warps=8)
    by_columns = (
        Output((depth, rows), dtype),
        Output((tiles_m, depth), "float32", transposed=True),
    )
    # H200, the same: two programs of 4 warps per processor, three tiles in flight, bands of 4: 0.1371 ms; without
    # bands 0.1383; one program per tile: 0.1518 with 8 warps and 128 registers, 0.154 with 4. Less shared memory than
    # an H200's has room for one program, whose 8 warps need no stack. On 11.0, which has 1536 threads, 4 warps need 208
    # bytes of stack with Triton 3.9. Predicated tiles of an odd number of rows have 16 warps of 128 registers: 8 warps
    # need up to 136 bytes of stack. Those of an even number have 8: 16 warps need up to 96 bytes with Triton 3.9.
    even = rows % _WIDTH == 0 and depth % _WIDTH == 0
    resident, warps = (2, 4) if machine.fits_measured_plans and even else (1, 16 if rows % 2 else 8)
    tiles = tiles_m * tiles_k
    programs = min(resident * machine.processors, tiles) if even else tiles
    stages = machine.stages(_WIDTH * _WIDTH, 3) if even else 1
    constants = (*steps, 4, stages, rows % 2 == 0, even, NATIVE)
    return Launch(
        both_blocks_kernel, (programs, 1, 1), by_rows + by_columns, shape, constants, warps
    )


@functools.lru_cache(maxsize=4096)
def square_blocks(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    power_of_two: bool,
    epsilon: float,
    value_for_inf: float,
) -> Launch:
    """Launch (x [M, K] contiguous) -> codes, scale [ceil(M/128), ceil(K/128)], codes_t, scale_t."""
    rows, depth = shape
    dtype = codes_dtype(element)
    tiles_m, tiles_k = ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((tiles_m, tiles_k), "float32") if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((tiles_k, tiles_m), "float32") if columnwise else None,
    )
    # H200, 8192 x 14336 bfloat16 to e4m3, both directions: 8 warps in bands of 4 0.1231 ms, in bands of 1 0.1238; 4
    # warps 0.1239. Rows only: 4 warps 0.0873, 8 warps 0.0892. Predicated tiles need up to 472 bytes of stack with 4
    # warps and up to 96 with 8.
    even = rows % _WIDTH == 0 and depth % _WIDTH == 0
    band, warps = (4, 8) if columnwise else (1, 4)
    warps = warps if even else 16
    constants = (
        element.maximum,
        epsilon,
        power_of_two,
        value_for_inf,
        band,
        rows % 2 == 0,
        even,
        NATIVE,
    )
    return Launch(square_block_kernel, (tiles_m * tiles_k, 1, 1), outputs, shape, constants, warps)

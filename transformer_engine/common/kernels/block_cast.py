"""codes [M, K] = saturate(x * scale of its tile), tiles of 1 x 128 or 128 x 128, both directions from one read."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from . import tile
from .launch import Launch, Output, codes_dtype
from .rounding import as_float, magnitude_bits, scale_from_amax

_WIDTH = 128
WIDTH = tl.constexpr(_WIDTH)


@triton.jit
def _pair_of_rows(x, M, K, first_m, first_k, half, k, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """Rows 2 r and 2 r + 1 of the tile, [BLOCK_M / 2, 128] each; without PAIRS all rows, twice."""
    step: tl.constexpr = 2 if PAIRS else 1
    m = first_m + half * step
    pointers = x + (first_m * K + first_k) + ((half * step)[:, None] * K + k[None, :])
    inside_k = (first_k + k < K)[None, :]
    even = tile.load(pointers, (m < M)[:, None] & inside_k, EVEN)
    if PAIRS:
        return even, tile.load(pointers + K, (m + 1 < M)[:, None] & inside_k, EVEN)
    return even, even


@triton.jit
def _store_rows(codes, M, K, first_m, first_k, rows, k, narrow, EVEN: tl.constexpr):
    inside = (first_m + rows < M)[:, None] & (first_k + k < K)[None, :]
    corner = codes + (first_m * K + first_k)
    tile.store(corner + (rows[:, None] * K + k[None, :]), narrow, inside, EVEN)


@triton.jit
def _store_columns(
    codes_t, M, K, first_m, first_k, half, k, even, odd, multiplier, PAIRS: tl.constexpr, EVEN: tl.constexpr
):
    """codes_t of the tile; PAIRS: the codes of two rows travel as one word of 16 bits, which halves the words that
    the transposition moves and fits the transposing matrix load (ldmatrix). M is even then."""
    element = codes_t.dtype.element_ty
    inside_k = (first_k + k < K)[:, None]
    if PAIRS:
        both = tl.join(even, odd).to(tl.float32) * multiplier
        low, high = tl.split(both.to(element))
        # Neighbours in one conversion instruction: the shift and the sum cost nothing.
        word = low.to(tl.uint8, bitcast=True).to(tl.uint16) | (high.to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
        corner = codes_t.to(tl.pointer_type(tl.uint16)) + (first_k * (M // 2) + first_m // 2)
        inside = inside_k & (first_m + half * 2 < M)[None, :]
        tile.store(corner + (k[:, None] * (M // 2) + half[None, :]), tl.trans(word), inside, EVEN)
    else:
        narrow = (even.to(tl.float32)[:, :, None] * multiplier).reshape(even.shape).to(element)
        corner = codes_t + (first_k * M + first_m)
        inside = inside_k & (first_m + half < M)[None, :]
        tile.store(corner + (k[:, None] * M + half[None, :]), tl.trans(narrow), inside, EVEN)


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
):
    """codes and scales of the tile's given rows, every one its own block."""
    amax = as_float(tl.max(magnitude_bits(values), 1))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    narrow = (values.to(tl.float32) * multiplier[:, None]).to(codes.dtype.element_ty)
    _store_rows(codes, M, K, first_m, first_k, rows, k, narrow, EVEN)
    tile.store(scale + (first_k // WIDTH * M + first_m) + rows, decode, first_m + rows < M, EVEN)


@triton.jit
def _row_block_tile(
    tile_m,
    tile_k,
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
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
):
    half = tl.arange(0, BLOCK_M // 2 if PAIRS else BLOCK_M)
    k = tl.arange(0, WIDTH)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * WIDTH).to(tl.int64)
    even, odd = _pair_of_rows(x, M, K, first_m, first_k, half, k, PAIRS, EVEN)
    if codes is not None:
        rows = half * 2 if PAIRS else half
        _row_blocks(
            codes, scale, M, K, first_m, first_k, rows, k, even, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, EVEN
        )
        if PAIRS:
            _row_blocks(
                codes, scale, M, K, first_m, first_k, rows + 1, k, odd, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, EVEN
            )
    if codes_t is not None:
        bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd)) if PAIRS else magnitude_bits(even)
        amax = as_float(tl.max(bits, 0))
        multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
        tile.store(scale_t + (first_m // WIDTH * K + first_k) + k, decode, first_k + k < K, EVEN)
        _store_columns(
            codes_t, M, K, first_m, first_k, half, k, even, odd, multiplier[None, :, None], PAIRS, EVEN
        )


@triton.jit
def row_block_kernel(
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
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """1 x 128 blocks; scale [ceil(K/128), M] and scale_t [ceil(M/128), K]. BLOCK_M = 128 with codes_t."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_k = tl.cdiv(K, WIDTH)
    if STAGES == 0:
        tile_m, tile_k = tile.position(tl.program_id(0), tiles_m, tiles_k, BAND)
        _row_block_tile(
            tile_m, tile_k, x, codes, scale, codes_t, scale_t, M, K,
            MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, BLOCK_M, PAIRS, EVEN,
        )
    else:
        for program in tl.range(tl.program_id(0), tiles_m * tiles_k, tl.num_programs(0), num_stages=STAGES):
            tile_m, tile_k = tile.position(program, tiles_m, tiles_k, BAND)
            _row_block_tile(
                tile_m, tile_k, x, codes, scale, codes_t, scale_t, M, K,
                MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, BLOCK_M, PAIRS, EVEN,
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
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """128 x 128 blocks; scale [ceil(M/128), ceil(K/128)], scale_t its transpose."""
    tiles_m = tl.cdiv(M, WIDTH)
    tiles_k = tl.cdiv(K, WIDTH)
    if STAGES == 0:
        tile_m, tile_k = tile.position(tl.program_id(0), tiles_m, tiles_k, BAND)
        _square_block_tile(
            tile_m, tile_k, tiles_m, tiles_k, x, codes, scale, codes_t, scale_t, M, K,
            MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, PAIRS, EVEN,
        )
    else:
        for program in tl.range(tl.program_id(0), tiles_m * tiles_k, tl.num_programs(0), num_stages=STAGES):
            tile_m, tile_k = tile.position(program, tiles_m, tiles_k, BAND)
            _square_block_tile(
                tile_m, tile_k, tiles_m, tiles_k, x, codes, scale, codes_t, scale_t, M, K,
                MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF, PAIRS, EVEN,
            )


@triton.jit
def _square_block_tile(
    tile_m,
    tile_k,
    tiles_m,
    tiles_k,
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
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
):
    half = tl.arange(0, WIDTH // 2 if PAIRS else WIDTH)
    k = tl.arange(0, WIDTH)
    tile_m, tile_k = tile_m.to(tl.int64), tile_k.to(tl.int64)
    even, odd = _pair_of_rows(x, M, K, tile_m * WIDTH, tile_k * WIDTH, half, k, PAIRS, EVEN)
    bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd)) if PAIRS else magnitude_bits(even)
    amax = as_float(tl.max(bits))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    if codes is not None:
        tl.store(scale + tile_m * tiles_k + tile_k, decode)
        element = codes.dtype.element_ty
        rows = half * 2 if PAIRS else half
        narrow = (even.to(tl.float32) * multiplier).to(element)
        _store_rows(codes, M, K, tile_m * WIDTH, tile_k * WIDTH, rows, k, narrow, EVEN)
        if PAIRS:
            narrow = (odd.to(tl.float32) * multiplier).to(element)
            _store_rows(codes, M, K, tile_m * WIDTH, tile_k * WIDTH, rows + 1, k, narrow, EVEN)
    if codes_t is not None:
        tl.store(scale_t + tile_k * tiles_m + tile_m, decode)
        _store_columns(
            codes_t, M, K, tile_m * WIDTH, tile_k * WIDTH, half, k, even, odd, multiplier, PAIRS, EVEN
        )


@functools.lru_cache(maxsize=None)
def row_blocks(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    power_of_two: bool,
    epsilon: float,
    value_for_inf: float,
) -> Launch:
    """Inputs: x [M, K] contiguous; outputs: codes, scale [M, ceil(K/128)], codes_t, scale_t [K, ceil(M/128)].

    The scales are stored with rows contiguous, as the products of 1 x 128 blocks read them.
    """
    rows, depth = shape
    dtype = codes_dtype(element)
    block_m, warps = (_WIDTH, 8) if columnwise else (32, 8)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((ceil_div(depth, _WIDTH), rows), "float32", transposed=True) if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((ceil_div(rows, _WIDTH), depth), "float32", transposed=True) if columnwise else None,
    )
    return Launch(
        row_block_kernel,
        grid=(ceil_div(rows, block_m) * ceil_div(depth, _WIDTH), 1, 1),
        outputs=outputs,
        scalars=(rows, depth),
        constants=(
            element.maximum,
            epsilon,
            power_of_two,
            value_for_inf,
            block_m,
            columnwise and rows % 2 == 0,
            rows % block_m == 0 and depth % _WIDTH == 0,
            1,
            0,
        ),
        warps=warps,
    )


@functools.lru_cache(maxsize=None)
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
    """Inputs: x [M, K] contiguous; outputs: codes, scale [ceil(M/128), ceil(K/128)], codes_t, scale_t."""
    rows, depth = shape
    dtype = codes_dtype(element)
    tiles_m, tiles_k = ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((tiles_m, tiles_k), "float32") if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((tiles_k, tiles_m), "float32") if columnwise else None,
    )
    return Launch(
        square_block_kernel,
        grid=(tiles_m * tiles_k, 1, 1),
        outputs=outputs,
        scalars=(rows, depth),
        constants=(
            element.maximum,
            epsilon,
            power_of_two,
            value_for_inf,
            columnwise and rows % 2 == 0,
            rows % _WIDTH == 0 and depth % _WIDTH == 0,
            1,
            0,
        ),
        warps=4,
    )

"""codes [M, K] = saturate(x * 2^(127 - e)), e one byte per 32 (or 32 x 32) elements; both directions from one read."""

from __future__ import annotations

import functools
from dataclasses import replace

import triton
import triton.language as tl

from ..formats import Element, ceil_div, round_up
from . import tile
from .conversion import NATIVE
from .grouped_gemm import matrix_base
from .launch import READ, AddressTable, Launch, Output, codes_dtype
from .rounding import as_float, magnitude_bits, to_codes
from .swizzled_scales import TILE_COLUMNS, TILE_ROWS, store_in_tiles

_GROUP = 32
GROUP = tl.constexpr(_GROUP)


@triton.jit
def _exponent(bits, INVERSE_MAXIMUM: tl.constexpr):
    """Compute the smallest e with 2^(e - 127) >= amax / maximum, at most 254; 255 for NaN. `bits` encode the amax."""
    scaled = (as_float(bits) * INVERSE_MAXIMUM).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = scaled >> 23
    mantissa = scaled & 0x7FFFFF
    # Subnormals up to 2^-127 have the smallest scale.
    above = mantissa > tl.where(exponent == 0, 0x400000, 0)
    rounded = tl.minimum(exponent + above.to(tl.int32), 254)
    return tl.where(scaled > 0x7F800000, 255, rounded)


@triton.jit
def _multiplier(exponent):
    """Compute 2^(127 - e) as float32; NaN for 255."""
    inverse = 254 - exponent
    bits = tl.where(inverse == 0, 0x400000, inverse << 23)
    return as_float(tl.where(inverse < 0, 0x7FC00000, bits))


@triton.jit
def _store_exponents(
    scale, R, C, first_r, first_c, rows, columns, exponents, EVEN: tl.constexpr, TILED: tl.constexpr
):
    if TILED:
        store_in_tiles(scale, R, C, first_r, first_c, rows, columns, exponents)
    else:
        tile.store_rows(scale, R, C, first_r, first_c, rows, columns, exponents, EVEN)


@triton.jit
def _store_row_blocks(
    codes,
    scale,
    M,
    K,
    first_m,
    first_k,
    rows,
    k,
    values,
    bits,
    INVERSE_MAXIMUM: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Store codes and exponents for a tile's given rows; bits [ROWS, GROUPS] are their blocks' amax."""
    exponent = _exponent(bits, INVERSE_MAXIMUM)
    scaled = values.to(tl.float32).reshape(ROWS, GROUPS, GROUP) * _multiplier(exponent)[:, :, None]
    narrow = to_codes(scaled.reshape(ROWS, GROUPS * GROUP), codes.dtype.element_ty, CONVERSION)
    tile.store_rows(codes, M, K, first_m, first_k, rows, k, narrow, EVEN)
    group = tl.arange(0, GROUPS)
    _store_exponents(
        scale,
        M,
        tl.cdiv(K, GROUP),
        first_m,
        first_k // GROUP,
        rows,
        group,
        exponent.to(tl.uint8),
        EVEN,
        TILED,
    )


@triton.jit
def _tile_of_blocks(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    program,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE_MAXIMUM: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize one matrix tile; see `block_kernel`."""
    HALF: tl.constexpr = BLOCK_M // 2
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    SPAN: tl.constexpr = GROUP // 2  # row pairs in a column block
    tiles_k = tl.cdiv(K, 128) * (128 // BLOCK_K) if TILED else tl.cdiv(K, BLOCK_K)
    half = tl.arange(0, HALF)
    k = tl.arange(0, BLOCK_K)
    first_m = (program // tiles_k * BLOCK_M).to(tl.int64)
    first_k = (program % tiles_k * BLOCK_K).to(tl.int64)
    even = tile.load_rows(x, M, K, first_m, first_k, half * 2, k, EVEN)
    odd = tile.load_rows(x, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    even_bits, odd_bits = magnitude_bits(even), magnitude_bits(odd)
    pair_bits = tl.maximum(even_bits, odd_bits)
    if SQUARE:
        of_pair = tl.max(pair_bits.reshape(HALF, GROUPS_K, GROUP), 2)
        of_square = tl.max(of_pair.reshape(GROUPS_M, SPAN, GROUPS_K), 1)
        of_even = (
            of_square[:, None, :].broadcast_to(GROUPS_M, SPAN, GROUPS_K).reshape(HALF, GROUPS_K)
        )
        of_odd = of_even
        of_column = (
            of_square[:, :, None].broadcast_to(GROUPS_M, GROUPS_K, GROUP).reshape(GROUPS_M, BLOCK_K)
        )
    else:
        of_even = tl.max(even_bits.reshape(HALF, GROUPS_K, GROUP), 2)
        of_odd = tl.max(odd_bits.reshape(HALF, GROUPS_K, GROUP), 2)
        of_column = tl.max(pair_bits.reshape(GROUPS_M, SPAN, BLOCK_K), 1)
    if codes is not None:
        rows = half * 2
        _store_row_blocks(
            codes,
            scale,
            M,
            K,
            first_m,
            first_k,
            rows,
            k,
            even,
            of_even,
            INVERSE_MAXIMUM,
            HALF,
            GROUPS_K,
            EVEN,
            TILED,
            CONVERSION,
        )
        _store_row_blocks(
            codes,
            scale,
            M,
            K,
            first_m,
            first_k,
            rows + 1,
            k,
            odd,
            of_odd,
            INVERSE_MAXIMUM,
            HALF,
            GROUPS_K,
            EVEN,
            TILED,
            CONVERSION,
        )
    if codes_t is not None:
        exponent = _exponent(of_column, INVERSE_MAXIMUM)
        pairs = tl.join(even, odd).to(tl.float32).reshape(GROUPS_M, SPAN, BLOCK_K, 2)
        pairs = (pairs * _multiplier(exponent)[:, None, :, None]).reshape(HALF, BLOCK_K, 2)
        pairs = to_codes(pairs, codes_t.dtype.element_ty, CONVERSION)
        tile.store_pairs_transposed(codes_t, M, K, first_m, first_k, half, k, pairs, PAIRS, EVEN)
        group = tl.arange(0, GROUPS_M)
        width = tl.cdiv(M, GROUP)
        exponent_t = tl.trans(exponent).to(tl.uint8)
        _store_exponents(
            scale_t, K, width, first_k, first_m // GROUP, k, group, exponent_t, EVEN, TILED
        )


@triton.jit
def block_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    INVERSE_MAXIMUM: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize; scale [M, ceil(K/32)], scale_t [K, ceil(M/32)] in bytes; SQUARE: one exponent per 32 x 32 elements."""
    _tile_of_blocks(
        x,
        codes,
        scale,
        codes_t,
        scale_t,
        tl.program_id(0),
        M,
        K,
        BLOCK_M,
        BLOCK_K,
        SQUARE,
        EVEN,
        TILED,
        PAIRS,
        INVERSE_MAXIMUM,
        CONVERSION,
    )


@triton.jit
def matrices_kernel(
    x,
    table,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    INVERSE_MAXIMUM: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    TILED: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize as `block_kernel` every matrix in an address table, or in a stack x, into stacks."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // tiles
    size = tl.cast(M, tl.int64) * K
    x = matrix_base(x, table, group, size)
    index = group.to(tl.int64)
    if codes is not None:
        codes += index * size
        scale += index * M * tl.cdiv(K, GROUP)
    if codes_t is not None:
        codes_t += index * size
        scale_t += index * K * tl.cdiv(M, GROUP)
    _tile_of_blocks(
        x,
        codes,
        scale,
        codes_t,
        scale_t,
        tl.program_id(0) % tiles,
        M,
        K,
        BLOCK_M,
        BLOCK_K,
        SQUARE,
        EVEN,
        TILED,
        PAIRS,
        INVERSE_MAXIMUM,
        CONVERSION,
    )


@functools.lru_cache(maxsize=4096)
def matrices(
    shape: tuple[int, int],
    groups: int,
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    square: bool,
) -> Launch:
    """Launch (x, table | None) -> codes [groups, M, K], scale, codes_t [groups, K, M], scale_t."""
    one = blocks(shape, element, rowwise, columnwise, square=square)
    stacks = [
        None if o is None or o.shape is None else Output((groups, *o.shape), o.dtype)
        for o in one.outputs
    ]
    grid = (groups * one.grid[0], 1, 1)
    return replace(
        one,
        kernel=matrices_kernel,
        grid=grid,
        outputs=tuple(stacks),
        tables=(AddressTable(1, (READ,)),),
        handles={},
        makers={},
    )


@functools.lru_cache(maxsize=4096)
def blocks(
    shape: tuple[int, int],
    element: Element,
    rowwise: bool,
    columnwise: bool,
    *,
    square: bool,
    tiled: bool = False,
) -> Launch:
    """Launch (x [M, K] contiguous) -> codes, scale [M, ceil(K/32)], codes_t, scale_t [K, ceil(M/32)].

    Args:
        square: 32 x 32 elements share an exponent.
        tiled: Scales are in swizzled order, padded to 128 x 4 tiles.
    """
    rows, depth = shape
    dtype = codes_dtype(element)
    # H200, 8192 x 14336 bfloat16 to e4m3: both directions 64 x 64 with 4 warps 0.182 ms, 128 x 64 0.193, 64 x 128
    # 0.234; rows only 32 x 128 with 4 warps 0.0918, 64 x 64 0.0983.
    block_m, block_k, warps = (64, 64, 4) if columnwise else (32, 128, 4)
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output(_extents(rows, ceil_div(depth, _GROUP), tiled), "uint8") if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output(_extents(depth, ceil_div(rows, _GROUP), tiled), "uint8") if columnwise else None,
    )
    # Further programs write the padding in full tiles.
    covered = (round_up(rows, 128), round_up(depth, 128)) if tiled else shape
    return Launch(
        block_kernel,
        grid=(ceil_div(covered[0], block_m) * ceil_div(covered[1], block_k), 1, 1),
        outputs=outputs,
        scalars=(rows, depth),
        constants=(
            1.0 / element.maximum,
            square,
            block_m,
            block_k,
            rows % 2 == 0,
            covered == shape and rows % block_m == 0 and depth % block_k == 0,
            tiled,
            NATIVE,
        ),
        warps=warps,
    )


def _extents(rows: int, columns: int, tiled: bool) -> tuple[int, int]:
    """Scale shape [rows, columns], padded to full tiles if `tiled`."""
    return (
        (round_up(rows, TILE_ROWS), round_up(columns, TILE_COLUMNS)) if tiled else (rows, columns)
    )

"""codes [M, K] = saturate(x * scale of its tile), tiles of 1 x 128 or 128 x 128, both directions from one read."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launch, Output
from .rounding import as_float, magnitude_bits, scale_from_amax

BLOCK = tl.constexpr(128)


@triton.jit
def _store(base, first_row, first_column, WIDTH, values, rows, columns, inside, EVEN: tl.constexpr, STORE: tl.constexpr):
    """values into the tile of a row-major matrix of WIDTH columns at base that starts at (first_row, first_column)."""
    corner = base + first_row * WIDTH + first_column
    if EVEN:
        tl.store(corner + rows[:, None] * WIDTH + columns[None, :], values, eviction_policy=STORE)
    else:
        tl.store(corner + rows[:, None] * WIDTH + columns[None, :], values, mask=inside, eviction_policy=STORE)


@triton.jit
def row_block_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    STRIDE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACK: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    DOWN: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """1 x 128 blocks. scale [ceil(K/128), M] and scale_t [ceil(M/128), K] are stored transposed."""
    program = tl.program_id(0)
    if DOWN:
        tiles_m = tl.cdiv(M, BLOCK_M)
        tile_m, tile_k = program % tiles_m, program // tiles_m
    else:
        tiles_k = tl.cdiv(K, BLOCK)
        tile_m, tile_k = program // tiles_k, program % tiles_k
    words = tl.arange(0, BLOCK_M // PACK)
    k = tl.max_contiguous(tl.arange(0, BLOCK), WIDTH)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * BLOCK).to(tl.int64)
    inside_k = first_k + k < K
    parts = ()
    greatest = tl.zeros([BLOCK_M // PACK, BLOCK], tl.int32)
    for part in tl.static_range(PACK):
        m = words * PACK + part
        inside = (first_m + m < M)[:, None] & inside_k[None, :]
        corner = x + first_m * STRIDE + first_k
        if EVEN:
            values = tl.load(corner + m[:, None] * STRIDE + k[None, :], eviction_policy=LOAD)
        else:
            values = tl.load(
                corner + m[:, None] * STRIDE + k[None, :], mask=inside, other=0.0, eviction_policy=LOAD
            )
        parts = parts + (values,)
    for part in tl.static_range(PACK):
        m = words * PACK + part
        values = parts[part]
        bits = magnitude_bits(values)
        greatest = tl.maximum(greatest, bits)
        if codes is not None:
            amax = as_float(tl.max(bits, 1))
            multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
            narrow = (values.to(tl.float32) * multiplier[:, None]).to(codes.dtype.element_ty)
            inside = (first_m + m < M)[:, None] & inside_k[None, :]
            _store(codes, first_m, first_k, K, narrow, m, k, inside, EVEN, STORE)
            if EVEN:
                tl.store(scale + tile_k.to(tl.int64) * M + first_m + m, decode)
            else:
                tl.store(scale + tile_k.to(tl.int64) * M + first_m + m, decode, mask=first_m + m < M)
    if codes_t is not None:
        amax = as_float(tl.max(greatest, 0))
        multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
        if EVEN:
            tl.store(scale_t + tile_m.to(tl.int64) * K + first_k + k, decode)
        else:
            tl.store(scale_t + tile_m.to(tl.int64) * K + first_k + k, decode, mask=inside_k)
        if PACK == 4:
            word = tl.zeros([BLOCK_M // PACK, BLOCK], tl.uint32)
        elif PACK == 2:
            word = tl.zeros([BLOCK_M // PACK, BLOCK], tl.uint16)
        else:
            word = tl.zeros([BLOCK_M // PACK, BLOCK], tl.uint8)
        for part in tl.static_range(PACK):
            narrow = (parts[part].to(tl.float32) * multiplier[None, :]).to(codes_t.dtype.element_ty)
            word |= narrow.to(tl.uint8, bitcast=True).to(word.dtype) << (8 * part)
        inside = (first_m + words * PACK < M)[None, :] & inside_k[:, None]
        base = codes_t.to(tl.pointer_type(word.dtype))
        _store(base, first_k, first_m // PACK, M // PACK, tl.trans(word), k, words, inside, EVEN, STORE)


@triton.jit
def square_block_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    STRIDE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    PACK: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    DOWN: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """128 x 128 blocks. scale [ceil(M/128), ceil(K/128)], scale_t its transpose."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK)
    tiles_k = tl.cdiv(K, BLOCK)
    if DOWN:
        tile_m, tile_k = program % tiles_m, program // tiles_m
    else:
        tile_m, tile_k = program // tiles_k, program % tiles_k
    words = tl.arange(0, BLOCK // PACK)
    k = tl.max_contiguous(tl.arange(0, BLOCK), WIDTH)
    first_m = (tile_m * BLOCK).to(tl.int64)
    first_k = (tile_k * BLOCK).to(tl.int64)
    inside_k = first_k + k < K
    parts = ()
    greatest = tl.zeros([BLOCK // PACK, BLOCK], tl.int32)
    for part in tl.static_range(PACK):
        m = words * PACK + part
        corner = x + first_m * STRIDE + first_k
        if EVEN:
            values = tl.load(corner + m[:, None] * STRIDE + k[None, :], eviction_policy=LOAD)
        else:
            inside = (first_m + m < M)[:, None] & inside_k[None, :]
            values = tl.load(
                corner + m[:, None] * STRIDE + k[None, :], mask=inside, other=0.0, eviction_policy=LOAD
            )
        greatest = tl.maximum(greatest, magnitude_bits(values))
        parts = parts + (values,)
    amax = as_float(tl.max(greatest))
    multiplier, decode = scale_from_amax(amax, MAXIMUM, EPSILON, POWER_OF_TWO, VALUE_FOR_INF)
    if codes is not None:
        tl.store(scale + tile_m.to(tl.int64) * tiles_k + tile_k, decode)
    if codes_t is not None:
        tl.store(scale_t + tile_k.to(tl.int64) * tiles_m + tile_m, decode)
    if PACK == 4:
        word = tl.zeros([BLOCK // PACK, BLOCK], tl.uint32)
    elif PACK == 2:
        word = tl.zeros([BLOCK // PACK, BLOCK], tl.uint16)
    else:
        word = tl.zeros([BLOCK // PACK, BLOCK], tl.uint8)
    for part in tl.static_range(PACK):
        m = words * PACK + part
        wide = parts[part].to(tl.float32) * multiplier
        if codes is not None:
            inside = (first_m + m < M)[:, None] & inside_k[None, :]
            _store(codes, first_m, first_k, K, wide.to(codes.dtype.element_ty), m, k, inside, EVEN, STORE)
        if codes_t is not None:
            narrow = wide.to(codes_t.dtype.element_ty)
            word |= narrow.to(tl.uint8, bitcast=True).to(word.dtype) << (8 * part)
    if codes_t is not None:
        inside = (first_m + words * PACK < M)[None, :] & inside_k[:, None]
        base = codes_t.to(tl.pointer_type(word.dtype))
        _store(base, first_k, first_m // PACK, M // PACK, tl.trans(word), k, words, inside, EVEN, STORE)

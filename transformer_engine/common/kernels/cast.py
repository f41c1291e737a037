"""codes [M, K] = saturate(x * scale), codes_t [K, M] = codes.T, amax = max|x|: one float32 scale for the matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launch, Output
from .rounding import magnitude_bits, scale_from_amax


@triton.jit
def absolute_maximum_kernel(
    x, amax, SIZE, KEEP_FROM, BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr
):
    """amax = max(amax, max|x|) for x [SIZE]; every program takes PARTS blocks."""
    offsets = tl.arange(0, BLOCK)
    greatest = tl.zeros([BLOCK], tl.int32)
    program = tl.program_id(0)
    for part in tl.static_range(PARTS):
        start = (program * PARTS + part).to(tl.int64) * BLOCK
        if KEEP:
            if program >= KEEP_FROM:
                values = tl.load(x + start + offsets, eviction_policy="evict_last")
            else:
                values = tl.load(x + start + offsets, eviction_policy="evict_first")
        elif EVEN:
            values = tl.load(x + start + offsets)
        else:
            values = tl.load(x + start + offsets, mask=start + offsets < SIZE, other=0.0)
        greatest = tl.maximum(greatest, magnitude_bits(values))
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(greatest, 0), sem="relaxed")


@triton.jit
def _scale(scale, amax, MAXIMUM: tl.constexpr, EPSILON: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    if scale is not None:
        given = tl.load(scale).to(tl.float32)
        return given, tl.div_rn(1.0, given)
    return scale_from_amax(tl.load(amax), MAXIMUM, EPSILON, POWER_OF_TWO, 3.4028234663852886e38)


@triton.jit
def cast_kernel(
    x,
    scale,
    amax,
    codes,
    scale_inv,
    SIZE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    REVERSE: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """codes [SIZE] of contiguous x [SIZE]; the matrix's shape does not matter."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    start = program.to(tl.int64) * BLOCK
    offsets = tl.max_contiguous(tl.arange(0, BLOCK), WIDTH)
    if EVEN:
        values = tl.load(x + start + offsets, eviction_policy=LOAD)
    else:
        values = tl.load(x + start + offsets, mask=start + offsets < SIZE, other=0.0, eviction_policy=LOAD)
    multiplier, decode = _scale(scale, amax, MAXIMUM, EPSILON, POWER_OF_TWO)
    if program == 0:
        tl.store(scale_inv, decode)
    narrow = (values.to(tl.float32) * multiplier).to(codes.dtype.element_ty)
    if EVEN:
        tl.store(codes + start + offsets, narrow, eviction_policy=STORE)
    else:
        tl.store(codes + start + offsets, narrow, mask=start + offsets < SIZE, eviction_policy=STORE)
    if RECORD:
        tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(magnitude_bits(values), 0), sem="relaxed")


@triton.jit
def cast_transpose_kernel(
    x,
    scale,
    amax,
    codes,
    codes_t,
    scale_inv,
    M,
    K,
    STRIDE,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACK: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    REVERSE: tl.constexpr,
    DOWN: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """codes [M, K] (unless None) and codes_t [K, M] of x [M, K] with rows STRIDE apart, a tile a program.

    PACK rows of a column travel together, so that the transposition moves words instead of bytes: codes_t is then
    written as integers of PACK bytes, and PACK divides M.
    """
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    if DOWN:
        tiles_m = tl.cdiv(M, BLOCK_M)
        tile_m, tile_k = program % tiles_m, program // tiles_m
    else:
        tiles_k = tl.cdiv(K, BLOCK_K)
        tile_m, tile_k = program // tiles_k, program % tiles_k
    multiplier, decode = _scale(scale, amax, MAXIMUM, EPSILON, POWER_OF_TWO)
    if program == 0:
        tl.store(scale_inv, decode)
    words = tl.arange(0, BLOCK_M // PACK)
    k = tl.max_contiguous(tl.arange(0, BLOCK_K), WIDTH)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * BLOCK_K).to(tl.int64)
    inside_k = first_k + k < K
    greatest = tl.zeros([BLOCK_M // PACK, BLOCK_K], tl.int32)
    if PACK == 4:
        word = tl.zeros([BLOCK_M // PACK, BLOCK_K], tl.uint32)
    elif PACK == 2:
        word = tl.zeros([BLOCK_M // PACK, BLOCK_K], tl.uint16)
    else:
        word = tl.zeros([BLOCK_M // PACK, BLOCK_K], tl.uint8)
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
        narrow = (values.to(tl.float32) * multiplier).to(codes_t.dtype.element_ty)
        if codes is not None:
            corner = codes + first_m * K + first_k
            if EVEN:
                tl.store(corner + m[:, None] * K + k[None, :], narrow, eviction_policy=STORE)
            else:
                tl.store(corner + m[:, None] * K + k[None, :], narrow, mask=inside, eviction_policy=STORE)
        word |= narrow.to(tl.uint8, bitcast=True).to(word.dtype) << (8 * part)
        if RECORD:
            greatest = tl.maximum(greatest, magnitude_bits(values))
    corner = codes_t.to(tl.pointer_type(word.dtype)) + first_k * (M // PACK) + first_m // PACK
    if EVEN:
        tl.store(corner + k[:, None] * (M // PACK) + words[None, :], tl.trans(word), eviction_policy=STORE)
    else:
        inside = (first_m + words * PACK < M)[None, :] & inside_k[:, None]
        tl.store(
            corner + k[:, None] * (M // PACK) + words[None, :], tl.trans(word), mask=inside, eviction_policy=STORE
        )
    if RECORD:
        tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(greatest), sem="relaxed")

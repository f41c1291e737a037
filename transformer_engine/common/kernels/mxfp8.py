"""codes [M, K] = saturate(x * 2^(127 - e)), e one byte for 32 (or 32 x 32) elements, both directions from one read."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import Element, ceil_div
from . import tile
from .launch import Launch, Output, codes_dtype
from .rounding import as_float, magnitude_bits

_GROUP = 32
GROUP = tl.constexpr(_GROUP)


@triton.jit
def _exponent(bits, INVERSE_MAXIMUM: tl.constexpr):
    """The least e with 2^(e - 127) >= amax / maximum, at most 254; 255 of a NaN. bits: those of amax."""
    scaled = (as_float(bits) * INVERSE_MAXIMUM).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = scaled >> 23
    mantissa = scaled & 0x7FFFFF
    # Of the subnormals, those up to 2^-127 take the least scale.
    above = mantissa > tl.where(exponent == 0, 0x400000, 0)
    rounded = tl.minimum(exponent + above.to(tl.int32), 254)
    return tl.where(scaled > 0x7F800000, 255, rounded)


@triton.jit
def _multiplier(exponent):
    """2^(127 - e) as float32; NaN of 255."""
    inverse = 254 - exponent
    bits = tl.where(inverse == 0, 0x400000, inverse << 23)
    return as_float(tl.where(inverse < 0, 0x7FC00000, bits))


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
    EVEN: tl.constexpr,
):
    """scale [M, ceil(K/32)] and scale_t [K, ceil(M/32)], bytes; SQUARE: one exponent for 32 x 32 elements."""
    GROUPS_M: tl.constexpr = BLOCK_M // GROUP
    GROUPS_K: tl.constexpr = BLOCK_K // GROUP
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first_m = (program // tiles_k * BLOCK_M).to(tl.int64)
    first_k = (program % tiles_k * BLOCK_K).to(tl.int64)
    inside_m, inside_k = first_m + m < M, first_k + k < K
    inside = inside_m[:, None] & inside_k[None, :]
    offsets = m[:, None] * K + k[None, :]
    values = tile.load(x + (first_m * K + first_k) + offsets, inside, EVEN)
    bits = magnitude_bits(values)
    wide = values.to(tl.float32)
    along_k = tl.max(bits.reshape(BLOCK_M, GROUPS_K, GROUP), 2)
    if SQUARE:
        of_square = tl.max(along_k.reshape(GROUPS_M, GROUP, GROUPS_K), 1)
        along_k = of_square[:, None, :].broadcast_to(GROUPS_M, GROUP, GROUPS_K).reshape(BLOCK_M, GROUPS_K)
    if codes is not None:
        exponent = _exponent(along_k, INVERSE_MAXIMUM)
        scaled = wide.reshape(BLOCK_M, GROUPS_K, GROUP) * _multiplier(exponent)[:, :, None]
        narrow = scaled.reshape(BLOCK_M, BLOCK_K).to(codes.dtype.element_ty)
        tile.store(codes + (first_m * K + first_k) + offsets, narrow, inside, EVEN)
        width = tl.cdiv(K, GROUP)
        group = tl.arange(0, GROUPS_K)
        kept = inside_m[:, None] & (first_k // GROUP + group < width)[None, :]
        corner = scale + (first_m * width + first_k // GROUP)
        tile.store(corner + (m[:, None] * width + group[None, :]), exponent.to(tl.uint8), kept, EVEN)
    if codes_t is not None:
        if SQUARE:
            along_m = of_square[:, :, None].broadcast_to(GROUPS_M, GROUPS_K, GROUP).reshape(GROUPS_M, BLOCK_K)
        else:
            along_m = tl.max(bits.reshape(GROUPS_M, GROUP, BLOCK_K), 1)
        exponent = _exponent(along_m, INVERSE_MAXIMUM)
        scaled = wide.reshape(GROUPS_M, GROUP, BLOCK_K) * _multiplier(exponent)[:, None, :]
        narrow = scaled.reshape(BLOCK_M, BLOCK_K).to(codes_t.dtype.element_ty)
        corner = codes_t + (first_k * M + first_m)
        tile.store(corner + (k[:, None] * M + m[None, :]), tl.trans(narrow), tl.trans(inside), EVEN)
        width = tl.cdiv(M, GROUP)
        group = tl.arange(0, GROUPS_M)
        kept = inside_k[:, None] & (first_m // GROUP + group < width)[None, :]
        corner = scale_t + (first_k * width + first_m // GROUP)
        tile.store(corner + (k[:, None] * width + group[None, :]), tl.trans(exponent).to(tl.uint8), kept, EVEN)


@functools.lru_cache(maxsize=None)
def blocks(shape: tuple[int, int], element: Element, rowwise: bool, columnwise: bool, *, square: bool) -> Launch:
    """Inputs: x [M, K] contiguous; outputs: codes, scale [M, ceil(K/32)], codes_t, scale_t [K, ceil(M/32)]."""
    rows, depth = shape
    dtype = codes_dtype(element)
    block_m, block_k, warps = 64, 128, 8
    outputs = (
        Output((rows, depth), dtype) if rowwise else None,
        Output((rows, ceil_div(depth, _GROUP)), "uint8") if rowwise else None,
        Output((depth, rows), dtype) if columnwise else None,
        Output((depth, ceil_div(rows, _GROUP)), "uint8") if columnwise else None,
    )
    return Launch(
        block_kernel,
        grid=(ceil_div(rows, block_m) * ceil_div(depth, block_k), 1, 1),
        outputs=outputs,
        scalars=(rows, depth),
        constants=(1.0 / element.maximum, square, block_m, block_k, rows % block_m == 0 and depth % block_k == 0),
        warps=warps,
    )

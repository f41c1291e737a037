"""codes_t [K, M] = codes.T for one-byte codes, in row pairs: half as many words cross the shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .launch import Launch, Output


@triton.jit
def transpose_kernel(
    codes,
    codes_t,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Transpose one tile. Without PAIRS, M is odd, and the two bytes of a word are stored separately."""
    tile_m, tile_k = tile.position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K), BAND)
    half = tl.arange(0, BLOCK_M // 2)
    k = tl.arange(0, BLOCK_K)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_k = (tile_k * BLOCK_K).to(tl.int64)
    low = _load(codes, M, K, first_m, first_k, half * 2, k, EVEN)
    high = _load(codes, M, K, first_m, first_k, half * 2 + 1, k, EVEN)
    words = tl.trans(low | (high << 8))
    inside_k = (first_k + k < K)[:, None]
    if PAIRS:
        corner = codes_t.to(tl.pointer_type(tl.uint16)) + (first_k * (M // 2) + first_m // 2)
        inside = inside_k & (first_m + half * 2 < M)[None, :]
        tile.store(corner + (k[:, None] * (M // 2) + half[None, :]), words, inside, EVEN)
    else:
        first = codes_t.to(tl.pointer_type(tl.uint8)) + (first_k * M + first_m)
        pointers = first + (k[:, None] * M + half[None, :] * 2)
        tl.store(
            pointers, (words & 0xFF).to(tl.uint8), mask=inside_k & (first_m + half * 2 < M)[None, :]
        )
        tl.store(
            pointers + 1,
            (words >> 8).to(tl.uint8),
            mask=inside_k & (first_m + half * 2 + 1 < M)[None, :],
        )


@triton.jit
def _load(codes, M, K, first_m, first_k, rows, k, EVEN: tl.constexpr):
    """Load code bytes, with any type, as words."""
    first = codes.to(tl.pointer_type(tl.uint8)) + (first_m * K + first_k)
    pointers = first + (rows[:, None] * K + k[None, :])
    if EVEN:
        return tl.load(pointers).to(tl.uint16)
    inside = (first_m + rows < M)[:, None] & (first_k + k < K)[None, :]
    return tl.load(pointers, mask=inside, other=0).to(tl.uint16)


def transpose(shape: tuple[int, int], dtype: str = "uint8") -> Launch:
    """Launch (codes [M, K] with a one-byte dtype, contiguous) -> codes_t [K, M]."""
    rows, depth = shape
    block_m, block_k, band, warps = (256, 128, 4, 8) if rows * depth > 1 << 22 else (64, 64, 4, 4)
    grid = (ceil_div(rows, block_m) * ceil_div(depth, block_k), 1, 1)
    even = rows % block_m == 0 and depth % block_k == 0
    constants = (block_m, block_k, band, rows % 2 == 0, even)
    return Launch(
        transpose_kernel, grid, (Output((depth, rows), dtype),), (rows, depth), constants, warps
    )

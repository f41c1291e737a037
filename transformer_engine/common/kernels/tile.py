"""Tiles in a row-major matrix: their positions, their loads, and stores of their transposes.

Each kernel's launch function chooses its tile sizes.

A tile's codes are transposed in pairs: the codes in rows 2 r and 2 r + 1 form one 16-bit word. This halves the words
that cross the shared memory and fits the transposing matrix load (ldmatrix). Both codes result from one conversion
instruction, so that the word costs nothing. Extracting single bytes from that result is not possible: ptxas 12.8 then
mixes up codes if they are also stored row by row, even with a separate conversion for each direction (full columns in
float32, half of the rows in bfloat16 at width 100, seen in sm_90's machine code).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def position(program, TILES_M, TILES_K, BAND: tl.constexpr):
    """Map a program to (tile row, tile column): BAND tile rows at a time, each band column by column."""
    band = program // (BAND * TILES_K)
    height = tl.minimum(TILES_M - band * BAND, BAND)
    within = program % (BAND * TILES_K)
    return band * BAND + within % height, within // height


@triton.jit
def load(pointers, inside, EVEN: tl.constexpr):
    """Load the elements at pointers, 0 outside."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store(pointers, values, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def load_rows(matrix, M, K, first_m, first_k, rows, k, EVEN: tl.constexpr):
    """Load elements (first_m + rows, first_k + k) from a matrix [M, K], 0 outside."""
    inside = (first_m + rows < M)[:, None] & (first_k + k < K)[None, :]
    return load(matrix + (first_m * K + first_k) + (rows[:, None] * K + k[None, :]), inside, EVEN)


@triton.jit
def store_rows(matrix, M, K, first_m, first_k, rows, k, values, EVEN: tl.constexpr):
    """Store values to elements (first_m + rows, first_k + k) in a matrix [M, K]."""
    inside = (first_m + rows < M)[:, None] & (first_k + k < K)[None, :]
    store(matrix + (first_m * K + first_k) + (rows[:, None] * K + k[None, :]), values, inside, EVEN)


@triton.jit
def store_pairs_transposed(
    codes_t, M, K, first_m, first_k, half, k, codes, PAIRS: tl.constexpr, EVEN: tl.constexpr
):
    """Store FP8 codes [rows / 2, columns, 2] (last axis: rows 2 half and 2 half + 1) in codes_t [K, M].

    With PAIRS, M is even, so that a word is stored as two adjacent bytes; an odd M needs two single-byte stores.
    """
    low, high = tl.split(codes)
    words = tl.trans(
        low.to(tl.uint8, bitcast=True).to(tl.uint16)
        | (high.to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
    )
    inside_k = (first_k + k < K)[:, None]
    if PAIRS:
        corner = codes_t.to(tl.pointer_type(tl.uint16)) + (first_k * (M // 2) + first_m // 2)
        inside = inside_k & (first_m + half * 2 < M)[None, :]
        store(corner + (k[:, None] * (M // 2) + half[None, :]), words, inside, EVEN)
    else:
        pointers = (
            codes_t.to(tl.pointer_type(tl.uint8))
            + (first_k * M + first_m)
            + (k[:, None] * M + half[None, :] * 2)
        )
        tl.store(
            pointers, (words & 0xFF).to(tl.uint8), mask=inside_k & (first_m + half * 2 < M)[None, :]
        )
        tl.store(
            pointers + 1,
            (words >> 8).to(tl.uint8),
            mask=inside_k & (first_m + half * 2 + 1 < M)[None, :],
        )

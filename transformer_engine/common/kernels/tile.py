"""Loads and stores of a tile, without masks where the tiles divide the matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointers, inside, EVEN: tl.constexpr):
    """The elements at pointers, 0 outside."""
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
def position(program, TILES_M, TILES_K, BAND: tl.constexpr):
    """(tile row, tile column) of a program: BAND rows of tiles at a time, each band column by column."""
    if BAND == 1:
        return program // TILES_K, program % TILES_K
    band = program // (BAND * TILES_K)
    height = tl.minimum(TILES_M - band * BAND, BAND)
    within = program % (BAND * TILES_K)
    return band * BAND + within % height, within // height

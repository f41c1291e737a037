"""total = total + parts[0] + parts[1] + .. in this order, added in float32 and rounded once."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .launch import Launch

_BLOCK = 1024  # elements per program


@triton.jit
def part_sums_kernel(
    total, parts, SIZE, STRIDE, PARTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """Add one block; STRIDE is the number of elements from one part to the next."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    added = tile.load(total + place, inside, EVEN).to(tl.float32)
    for part in tl.static_range(PARTS):
        added += tile.load(parts + tl.cast(STRIDE, tl.int64) * part + place, inside, EVEN).to(
            tl.float32
        )
    tile.store(total + place, added.to(total.dtype.element_ty), inside, EVEN)


@functools.cache
def part_sums(size: int, stride: int, parts: int) -> Launch:
    """Launch (total [size], parts, of which each begins `stride` elements after the previous one); writes total."""
    grid = (ceil_div(size, _BLOCK), 1, 1)
    constants = (parts, _BLOCK, size % _BLOCK == 0)
    return Launch(part_sums_kernel, grid, (), (size, stride), constants, 4, in_place=(0,))

"""The scale order that matrix instructions read: kernels that write it, and loads of its tiles.

One-byte scales [R, C] are in 128 x 4 tiles, and byte (r, c) of a tile is at (r % 32) * 16 + r // 32 * 4 + c (cuBLAS
documentation, "1D block scaling factors layout"). Tiles follow each other row by row.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div, round_up
from .launch import Launch, Output

TILE_ROWS, TILE_COLUMNS = 128, 4  # scales per tile in swizzled order


def swizzled_size(rows: int, columns: int) -> int:
    """Byte count for swizzled scales [rows, columns]."""
    return round_up(rows, TILE_ROWS) * round_up(columns, TILE_COLUMNS)


@triton.jit
def to_exponent_bytes(scale):
    """Convert float32 scales, powers of two from 2^-127 on, to E8M0 bytes; infinity and NaN become NaN."""
    return ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)


@triton.jit
def swizzle_kernel(
    scale,
    out,
    R,
    C,
    ROW_STRIDE,
    COLUMN_STRIDE,
    TILES: tl.constexpr,
    BACK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Copy scales [R, C] to swizzled order, with zeros behind both extents; BACK copies swizzled scales to [R, C].

    With UNIT > 0, scales are float32 for UNIT rows and 4 columns; their exponents are copied.
    """
    position = tl.arange(0, TILES * 512)
    byte = position % 512
    row = tl.program_id(0) * 128 + byte % 16 // 4 * 32 + byte // 16
    column = (tl.program_id(1) * TILES + position // 512) * 4 + byte % 4
    tiles_c = tl.cdiv(C, 4)
    first = (tl.program_id(0).to(tl.int64) * tiles_c + tl.program_id(1) * TILES) * 512
    inside = (row < R) & (column < C)
    if UNIT > 0:
        compact = (row // UNIT).to(tl.int64) * ROW_STRIDE + (column // 4).to(
            tl.int64
        ) * COLUMN_STRIDE
    else:
        compact = row.to(tl.int64) * ROW_STRIDE + column.to(tl.int64) * COLUMN_STRIDE
    exists = tl.program_id(1) * TILES + position // 512 < tiles_c
    if BACK:
        tl.store(
            out + compact, tl.load(scale + first + position, mask=exists, other=0), mask=inside
        )
    elif UNIT > 0:
        exponents = to_exponent_bytes(tl.load(scale + compact, mask=inside, other=0.0))
        tl.store(out + first + position, exponents, mask=exists)
    else:
        tl.store(
            out + first + position, tl.load(scale + compact, mask=inside, other=0), mask=exists
        )


@triton.jit
def scales_of_tile(
    scale,
    first_row,
    first_column,
    TILES_C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load scales [ROWS, COLUMNS] from swizzled memory; fewer than 128 rows are part of one tile."""
    if ROWS >= 128:
        r = tl.arange(0, ROWS // 128)[:, None, None]
        c = tl.arange(0, COLUMNS // 4)[None, :, None]
        e = tl.arange(0, 512)[None, None, :]
        tile_c = first_column // 4 + c
        places = scale + ((first_row // 128 + r).to(tl.int64) * TILES_C + tile_c) * 512 + e
        if EVEN:
            scale_bytes = tl.load(places)
        else:
            scale_bytes = tl.load(places, mask=tile_c < TILES_C, other=0.0)
        parts = scale_bytes.reshape(ROWS // 128, COLUMNS // 4, 32, 4, 4)
        scales = parts.trans(0, 3, 2, 1, 4).reshape(ROWS, COLUMNS)
    else:
        r = first_row + tl.arange(0, ROWS)[:, None]
        c = first_column + tl.arange(0, COLUMNS)[None, :]
        tiles = (r // 128).to(tl.int64) * TILES_C + c // 4
        places = scale + tiles * 512 + (r % 32 * 16 + r % 128 // 32 * 4 + c % 4)
        if EVEN:
            scales = tl.load(places)
        else:
            scales = tl.load(places, mask=c // 4 < TILES_C, other=0.0)
    return scales


@triton.jit
def descriptor_of_tiles(scale, R, TILES_C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Describe swizzled scales for R rows to TMA: [1, row tiles, column tiles, 2, 256] bytes."""
    tiles_r = tl.cdiv(R, 128)
    row = tl.cast(TILES_C, tl.int64) * 512
    return tl.make_tensor_descriptor(
        scale,
        [1, tiles_r, TILES_C, 2, 256],
        [tiles_r * row, row, 512, 256, 1],
        [1, ROWS // 128, COLUMNS // 4, 2, 256],
    )


@triton.jit
def load_scale_tile(tiles, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load scales [ROWS, COLUMNS] through a tile descriptor by TMA; tcgen05.cp moves them on to tensor memory."""
    scale_bytes = tiles.load([0, first_row // 128, first_column // 4, 0, 0])
    parts = scale_bytes.reshape(ROWS // 128, COLUMNS // 4, 32, 4, 4)
    return parts.trans(0, 3, 2, 1, 4).reshape(ROWS, COLUMNS)


@triton.jit
def store_in_tiles(scale, R, C, first_r, first_c, rows, columns, values):
    """Store one-byte scales (first_r + rows, first_c + columns) of [R, C] in swizzled order, zeros in the padding."""
    r = first_r + rows
    c = first_c + columns
    tiles_c = tl.cdiv(C, 4)
    places = (r // 128).to(tl.int64)[:, None] * (tiles_c * 512) + (c // 4)[None, :] * 512
    places += (r % 32 * 16 + r % 128 // 32 * 4)[:, None] + (c % 4)[None, :]
    inside = (r < R)[:, None] & (c < C)[None, :]
    exists = (r < tl.cdiv(R, 128) * 128)[:, None] & (c < tiles_c * 4)[None, :]
    scaled = tl.where(inside, values.to(tl.uint8, bitcast=True), 0)
    tl.store(
        scale.to(tl.pointer_type(tl.uint8), bitcast=True) + places, scaled.to(tl.uint8), mask=exists
    )


@triton.jit
def exponents_of_tile(
    scale,
    rows,
    R,
    block,
    ROW,
    COLUMN,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load the exponents [ROWS, COLUMNS] for 128 columns from float32 scales for UNIT rows of R."""
    read = (tl.minimum(rows, R - 1) // UNIT).to(tl.int64)
    exponents = to_exponent_bytes(tl.load(scale + read * ROW + block * COLUMN))
    return tl.broadcast_to(exponents[:, None], (ROWS, COLUMNS))


@functools.lru_cache(maxsize=4096)
def swizzle(rows: int, columns: int, strides: tuple[int, int], back: bool = False) -> Launch:
    """Launch (scales uint8 [rows, columns] with these strides) -> swizzled bytes; back: the reverse."""
    tiles = min(8, triton.next_power_of_2(ceil_div(columns, TILE_COLUMNS)))
    grid = (ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS * tiles), 1)
    size = (rows * columns,) if back else (swizzled_size(rows, columns),)
    scalars = (rows, columns, *strides)
    return Launch(
        swizzle_kernel, grid, (Output(size, "uint8"),), scalars, (tiles, back, 0), warps=4
    )


@functools.lru_cache(maxsize=4096)
def swizzle_exponents(rows: int, columns: int, strides: tuple[int, int], unit: int) -> Launch:
    """Launch (float32 scales for `unit` rows and 128 elements) -> swizzled exponents.

    Args:
        rows: Code rows.
        columns: Exponents per row, one for 32 elements.
        strides: Elements between scales of consecutive blocks, along the rows and along the columns.
        unit: Rows that share a scale, 1 or 128.
    """
    tiles = min(8, triton.next_power_of_2(ceil_div(columns, TILE_COLUMNS)))
    grid = (ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS * tiles), 1)
    output = Output((swizzled_size(rows, columns),), "uint8")
    return Launch(
        swizzle_kernel, grid, (output,), (rows, columns, *strides), (tiles, False, unit), warps=4
    )

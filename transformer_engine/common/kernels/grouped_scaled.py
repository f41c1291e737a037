"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e from MXFP8 or NVFP4 codes, per row group.

Matrix instructions read the block scales (`scaled_product.py`), which are row-major here: a group may begin at any row
in a tile of swizzled scales. The group positions are in a tensor on the device (`grouped_layout`). NVFP4 has a
second-level scale per group and operand, or per row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .grouped_gemm import matrix_base
from .grouped_layout import (
    ROWS,
    first_padding_row,
    group_of_tile,
    group_or_none,
    rows_of_group,
    tiles_at_most,
)
from .launch import WRITTEN, AddressTable, Launch, Output

# Divisor of the groups' rows in a column product: 16-byte loads of packed codes stay aligned.
ROW_MULTIPLE = 32
ALIGN = tl.constexpr(ROW_MULTIPLE)


@dataclass(frozen=True)
class BlockScales:
    """Block scales for both operands.

    Attributes:
        elements: Elements of both operands: "e4m3" or "e5m2" with exponents, or "e2m1" twice, packed in pairs.
        length: Elements per block scale.
        factor: Factor for the product of both second-level maxima; None without a second level.
        row_scaled: The left operand has one maximum per row instead of one per group.
    """

    elements: tuple[str, str]
    length: int = 32
    factor: float | None = None
    row_scaled: bool = False

    @property
    def packing(self) -> int:
        """Codes per byte."""
        return 2 if self.elements[0] == "e2m1" else 1


@triton.jit
def rows_kernel(
    a,
    b,
    layout,
    scale_a,
    scale_b,
    level_a,
    level_b,
    bias,
    out,
    N,
    K,
    TILES_M,
    TOTAL,
    RANGE,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LENGTH: tl.constexpr,
    PACKING: tl.constexpr,
    ROWS_A: tl.constexpr,
    CLEARS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute out [total, N]: group e has a's rows [.., K] @ b_e [N, K].T; b [GROUPS, N, K].

    Args:
        scale_a: Block scales [total, K / LENGTH].
        scale_b: Block scales [GROUPS, N, K / LENGTH].
        level_a: Maxima [GROUPS], or [total] if ROWS_A, whose multiples by RANGE scale the sums; or None.
        level_b: Maxima [GROUPS]; or None.
        EVEN: K is a multiple of BLOCK_K.
        TOTAL: Rows of a.
        CLEARS: Rows after the last group become zero; otherwise they are not written.
        TMA: TMA loads the codes, with zeros past the end.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), TILES_M, tl.cdiv(N, BLOCK_N), BAND)
    k = tl.arange(0, BLOCK_K // PACKING)
    s = tl.arange(0, BLOCK_K // LENGTH)
    m = tl.arange(0, ROWS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    group = (
        group_or_none(layout, tile_m, TILES_M, GROUPS)
        if CLEARS
        else group_of_tile(layout, tile_m, GROUPS)
    )
    if CLEARS:  # noqa: SIM102  (a constant, which removes the branch)
        if group >= GROUPS:
            first = first_padding_row(layout, tile_m, GROUPS)
            padding = out + first.to(tl.int64) * N + (m[:, None] * N + n[None, :])
            unused = (first + m < TOTAL)[:, None] & (n < N)[None, :]
            tl.store(padding, tl.zeros((ROWS, BLOCK_N), out.dtype.element_ty), mask=unused)
    if group >= GROUPS:
        return
    start, rows, first_tile, _ = rows_of_group(layout, group, GROUPS)
    first_m = (tile_m - first_tile) * ROWS
    corner = (start + first_m).to(tl.int64)
    # Rows past the end are clamped rather than masked: their results are not stored.
    # Offsets inside a tile have 32 bits, because K is below LARGEST_EXTENT.
    read_m = tl.minimum(m, tl.maximum(rows - first_m - 1, 0))  # a tile has at least one row
    read_n = tl.minimum(tl.arange(0, BLOCK_N), N - tile_n * BLOCK_N - 1)
    pitch = K // PACKING
    columns = K // LENGTH
    corner_b = group.to(tl.int64) * N + tile_n * BLOCK_N
    width: tl.constexpr = BLOCK_K // PACKING
    if TMA:
        stride = tl.cast(pitch, tl.int64)
        a_tiles = tl.make_tensor_descriptor(a, [TOTAL, pitch], [stride, 1], [ROWS, width])
        b_tiles = tl.make_tensor_descriptor(b, [GROUPS * N, pitch], [stride, 1], [BLOCK_N, width])
    else:
        a_tile = a + corner * pitch + (read_m[:, None] * pitch + k[None, :])
        b_tile = b + corner_b * pitch + (read_n[:, None] * pitch + k[None, :])
    a_scale = scale_a + corner * columns + (read_m[:, None] * columns + s[None, :])
    b_scale = scale_b + corner_b * columns + (read_n[:, None] * columns + s[None, :])
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        if TMA:
            a_codes = a_tiles.load([start + first_m, block * width])
            b_codes = b_tiles.load([group * N + tile_n * BLOCK_N, block * width])
        elif EVEN:
            a_codes = tl.load(a_tile)
            b_codes = tl.load(b_tile)
        else:
            inside = (k < (K - block * BLOCK_K) // PACKING)[None, :]
            a_codes = tl.load(a_tile, mask=inside, other=0.0)
            b_codes = tl.load(b_tile, mask=inside, other=0.0)
        if EVEN:
            a_scales = tl.load(a_scale)
            b_scales = tl.load(b_scale)
        else:
            exists = (s < columns - block * (BLOCK_K // LENGTH))[None, :]
            a_scales = tl.load(a_scale, mask=exists, other=0.0)
            b_scales = tl.load(b_scale, mask=exists, other=0.0)
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
        a_scale += BLOCK_K // LENGTH
        b_scale += BLOCK_K // LENGTH
        if not TMA:
            a_tile += width
            b_tile += width
    if level_a is not None:
        # The product of the maxima is as large as the result, so that it neither overflows nor underflows before it.
        level = tl.load(level_b + group)
        total *= RANGE
        if ROWS_A:
            total *= (tl.load(level_a + corner + read_m) * level)[:, None]
        else:
            total *= tl.load(level_a + group) * level
    if bias is not None:
        added = tl.load(bias + group.to(tl.int64) * N + n, mask=n < N, other=0.0)
        total += added.to(tl.float32)[None, :]
    places = out + corner * N + (m[:, None] * N + n[None, :])
    tl.store(
        places,
        total.to(out.dtype.element_ty),
        mask=(m < rows - first_m)[:, None] & (n < N)[None, :],
    )


@triton.jit
def columns_kernel(
    a,
    b,
    scale_a,
    scale_b,
    level_a,
    level_b,
    layout,
    table,
    out,
    TOTAL,
    N,
    K,
    RANGE,
    GROUPS: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LENGTH: tl.constexpr,
    PACKING: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute out_e [N, K], summed over group e's rows in a [N, TOTAL] and b [K, TOTAL]; groups have ALIGN i rows.

    Args:
        scale_a: Block scales [N, TOTAL / LENGTH].
        scale_b: Block scales [K, TOTAL / LENGTH].
        level_a, level_b: Maxima [GROUPS], whose multiples by RANGE scale the sums; or None.
        TMA: TMA loads the codes, with zeros past the group's end.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = tile.position(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, BAND)
    start, rows, _, _ = rows_of_group(layout, group, GROUPS)
    # Multiples that the compiler sees, for 16-byte loads and their masks.
    start = start // ALIGN * ALIGN
    first_s = start // LENGTH
    rows = rows // ALIGN * ALIGN
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M // PACKING)
    s = tl.arange(0, BLOCK_M // LENGTH)
    # Columns past the end are clamped rather than masked: their results are not stored.
    # Offsets inside a tile have 32 bits, because TOTAL is below LARGEST_EXTENT.
    read_n = tl.minimum(tl.arange(0, BLOCK_N), N - tile_n * BLOCK_N - 1)
    read_k = tl.minimum(tl.arange(0, BLOCK_K), K - tile_k * BLOCK_K - 1)
    width = TOTAL // LENGTH
    pitch = TOTAL // PACKING
    corner_n = (tile_n * BLOCK_N).to(tl.int64)
    corner_k = (tile_k * BLOCK_K).to(tl.int64)
    first_byte = start // PACKING
    step: tl.constexpr = BLOCK_M // PACKING
    if TMA:
        stride = tl.cast(pitch, tl.int64)
        end = tl.maximum(first_byte + rows // PACKING, 1)  # a descriptor has no empty axis
        a_tiles = tl.make_tensor_descriptor(a, [N, end], [stride, 1], [BLOCK_N, step])
        b_tiles = tl.make_tensor_descriptor(b, [K, end], [stride, 1], [BLOCK_K, step])
    else:
        a_tile = a + (corner_n * pitch + first_byte) + (read_n[:, None] * pitch + m[None, :])
        b_tile = b + (corner_k * pitch + first_byte) + (read_k[:, None] * pitch + m[None, :])
    a_scale = scale_a + (corner_n * width + first_s) + (read_n[:, None] * width + s[None, :])
    b_scale = scale_b + (corner_k * width + first_s) + (read_k[:, None] * width + s[None, :])
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(rows, BLOCK_M), num_stages=STAGES):
        exists = (s < (rows - block * BLOCK_M) // LENGTH)[None, :]
        if TMA:
            a_codes = a_tiles.load([tile_n * BLOCK_N, first_byte + block * step])
            b_codes = b_tiles.load([tile_k * BLOCK_K, first_byte + block * step])
        else:
            inside = (m < (rows - block * BLOCK_M) // PACKING)[None, :]
            a_codes = tl.load(a_tile, mask=inside, other=0.0)
            b_codes = tl.load(b_tile, mask=inside, other=0.0)
        a_scales = tl.load(a_scale, mask=exists, other=0.0)
        b_scales = tl.load(b_scale, mask=exists, other=0.0)
        a_scale += BLOCK_M // LENGTH
        b_scale += BLOCK_M // LENGTH
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
        if not TMA:
            a_tile += step
            b_tile += step
    if level_a is not None:
        total *= RANGE
        total *= tl.load(level_a + group) * tl.load(level_b + group)
    corner = tl.cast(tile_n * BLOCK_N, tl.int64) * K + tile_k * BLOCK_K
    places = matrix_base(out, table, group, tl.cast(N, tl.int64) * K) + corner
    places += tl.arange(0, BLOCK_N)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ACCUMULATE:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


# 128 x 128 tiles with 8 warps, 128 elements per step: tcgen05.mma on 10.x and 11.0 with at least 128 rows, and mma.sync
# without stack on 12.x, where 256 NVFP4 elements per step spill 40 bytes. The stages, by codes per byte, fit its 99
# KiB. Compiled with Triton 3.6 to 3.9.
_SIDE, _STEP, _STAGES, _WARPS = 128, 128, {1: 3, 2: 5}, 8


@functools.lru_cache(maxsize=4096)
def product_of_rows(
    total: int,
    width: int,
    depth: int,
    groups: int,
    scales: BlockScales,
    *,
    clears: bool = False,
    tma: bool = False,
) -> Launch:
    """Launch (a [total, depth], b, layout, scales, maxima | None, bias | None) -> out [total, width].

    Scales and maxima are passed for a and b. 4-bit codes are packed: a is [total, depth / 2].

    Args:
        clears: Rows after the last group become zero; otherwise they are not written.
        tma: TMA loads the codes; addresses and rows must be multiples of 16 bytes.
    """
    tiles_m = tiles_at_most(total, groups) + clears
    constants = (
        depth % _STEP == 0,
        groups,
        _STAGES[scales.packing],
        *scales.elements,
        scales.length,
        scales.packing,
        scales.row_scaled,
        clears,
        _SIDE,
        _STEP,
        8,
        tma,
    )
    return Launch(
        rows_kernel,
        (tiles_m * ceil_div(width, _SIDE), 1, 1),
        (Output((total, width), None),),
        (width, depth, tiles_m, total, scales.factor or 1.0),
        constants,
        _WARPS,
    )


@functools.lru_cache(maxsize=4096)
def product_of_columns(
    total: int,
    width: int,
    depth: int,
    groups: int,
    scales: BlockScales,
    *,
    accumulates: bool = False,
    by_address: bool = False,
    tma: bool = False,
) -> Launch:
    """Launch (a, b, scales, maxima | None, layout, table of results | None) -> out [groups, width, depth].

    Scales and maxima are passed for a and b.

    Args:
        accumulates: Add to the values in out.
        by_address: The table's matrices are written; out is one table matrix, for its dtype.
        tma: See `product_of_rows`.
    """
    grid = (groups * ceil_div(width, _SIDE) * ceil_div(depth, _SIDE), 1, 1)
    outputs = () if by_address or accumulates else (Output((groups, width, depth), None),)
    constants = (
        groups,
        *scales.elements,
        scales.length,
        scales.packing,
        accumulates,
        _SIDE,
        _SIDE,
        _STEP,
        8,
        _STAGES[scales.packing],
        tma,
    )
    return Launch(
        *(
            columns_kernel,
            grid,
            outputs,
            (total, width, depth, scales.factor or 1.0),
            constants,
            _WARPS,
        ),
        in_place=(8,) if accumulates and not by_address else (),
        tables=(AddressTable(7, (WRITTEN,)),) if by_address else (),
    )

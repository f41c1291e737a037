"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e for consecutive row groups.

The group positions are in a tensor on the device (`grouped_layout`). Codes that are contracted along the rows
are stored group by group, each [columns, rows rounded up to 128] with zeros at the end.

Partial sums are float32. FP8 products with one scale per tensor either accumulate in the tensor cores, which keep about
14 bits of the sum, or promote it every BLOCK_K elements; products with block scales promote it every block.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .grouped_layout import (
    ROWS,
    first_padding_row,
    group_of_tile,
    group_or_none,
    rows_of_group,
    tiles_at_most,
)
from .launch import READ, WRITTEN, AddressTable, Launch, Output

SCALE_SLOT = (
    4  # floats from one group's scale to the next: cuBLASLt reads scales at multiples of 16 bytes
)
SLOT = tl.constexpr(SCALE_SLOT)

UNSCALED, TENSOR_SCALES, BLOCK_SCALES = 0, 1, 2
_BY_TENSOR = tl.constexpr(TENSOR_SCALES)
_BY_BLOCK = tl.constexpr(BLOCK_SCALES)


@triton.jit
def matrix_base(matrices, table, group, size):
    """Address of matrix `group` in a stack, or in an address table if there is one."""
    if table is None:
        base = matrices + group.to(tl.int64) * size
    else:
        base = tl.multiple_of(
            tl.load(table + group).to(tl.pointer_type(matrices.dtype.element_ty)), 16
        )
    return base


@triton.jit
def rows_kernel(
    a,
    b,
    table,
    scale_a,
    scale_b,
    bias,
    layout,
    out,
    N,
    K,
    TILES_M,
    TOTAL,
    GROUPS: tl.constexpr,
    SCALING: tl.constexpr,
    IMPRECISE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    CLEARS: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
):
    """Compute out [total, N]: group e has a's rows [.., K] @ b_e [N, K].T (TRANSPOSED: @ b_e [K, N]).

    Args:
        scale_a: Per tensor [GROUPS, SLOT]; per block, group after group, [ceil(K / 128), rows], or all rows together,
            [total, ceil(K / 128)], if ROW_MAJOR.
        scale_b: Per tensor [GROUPS, SLOT]; per block [GROUPS, ceil(N / 128), ceil(K / 128)].
        CLEARS: Rows after the last group, up to TOTAL, become zero; otherwise they are not written.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), TILES_M, tl.cdiv(N, BLOCK_N), BAND)
    if CLEARS:
        group = group_or_none(layout, tile_m, TILES_M, GROUPS)
        if group >= GROUPS:
            first = first_padding_row(layout, tile_m, GROUPS)
            n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            places = out + first.to(tl.int64) * N + (tl.arange(0, ROWS)[:, None] * N + n[None, :])
            inside = (first + tl.arange(0, ROWS) < TOTAL)[:, None] & (n < N)[None, :]
            tl.store(places, tl.zeros((ROWS, BLOCK_N), out.dtype.element_ty), mask=inside)
    else:
        group = group_of_tile(layout, tile_m, GROUPS)
    if group >= GROUPS:
        return
    start, rows, first_tile, _ = rows_of_group(layout, group, GROUPS)
    first_m = (tile_m - first_tile) * ROWS
    corner = (start + first_m).to(tl.int64)
    m = tl.arange(0, ROWS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end are clamped rather than masked: their results are not stored.
    read_m = tl.minimum(m, rows - first_m - 1)
    read_n = tl.minimum(n, N - 1)
    # A matrix can have more than 2^31 elements. The tiles' first offsets are computed outside the loop.
    a_tile = a + corner * K + (read_m.to(tl.int64)[:, None] * K + k[None, :])
    b_base = matrix_base(b, table, group, tl.cast(N, tl.int64) * K)
    if TRANSPOSED:
        b_tile = b_base + (k.to(tl.int64)[:, None] * N + n[None, :])
    else:
        b_tile = b_base + (read_n.to(tl.int64)[None, :] * K + k[:, None])
    blocks_k = tl.cdiv(K, BLOCK_K)
    if SCALING == _BY_BLOCK:
        if ROW_MAJOR:
            sa = scale_a + corner * blocks_k + read_m.to(tl.int64) * blocks_k
            step_a = 1
        else:
            sa = scale_a + start.to(tl.int64) * blocks_k + first_m + read_m
            step_a = rows
        row_of_scales = group.to(tl.int64) * tl.cdiv(N, ROWS) + tile_n * BLOCK_N // ROWS
        sb = scale_b + row_of_scales * blocks_k
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, blocks_k, num_stages=STAGES):
        if EVEN:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            inside = k < K - block * BLOCK_K
            a_values = tl.load(a_tile, mask=inside[None, :], other=0.0)
            b_values = tl.load(b_tile, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        if SCALING == _BY_BLOCK:
            rescale = tl.load(sa + tl.cast(block, tl.int64) * step_a) * tl.load(sb + block)
            total += tl.dot(a_values, b_values) * rescale[:, None]
        else:
            total = tl.dot(a_values, b_values, total, max_num_imprecise_acc=IMPRECISE)
        a_tile += BLOCK_K
        b_tile += BLOCK_K * N if TRANSPOSED else BLOCK_K
    if SCALING == _BY_TENSOR:
        total = total * tl.load(scale_a + group * SLOT) * tl.load(scale_b + group * SLOT)
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
    layout,
    table,
    out,
    N,
    K,
    TOTAL,
    GROUPS: tl.constexpr,
    SCALING: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILED: tl.constexpr,
):
    """Compute out_e [N, K], summed over group e's rows of a [.., N] and b [.., K], or of codes [N, rows], [K, rows].

    Args:
        TOGETHER: The codes of all groups are one matrix [N, TOTAL] and one [K, TOTAL], in which groups begin at tiles.
        TILED: The codes are [N, 128] and [K, 128] for every tile of 128 rows.
        scale_a: Per tensor [GROUPS, SLOT]; per block, group after group, [tiles, N].
        scale_b: Per tensor [GROUPS, SLOT]; per block, group after group, [tiles, K].
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = tile.position(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, BAND)
    start, rows, first_tile, tiles = rows_of_group(layout, group, GROUPS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if SCALING == 0:
        a_tile = a + start.to(tl.int64) * N + (m[:, None] * N + n[None, :])
        b_tile = b + start.to(tl.int64) * K + (m[:, None] * K + k[None, :])
        inside_n = (n < N)[None, :]
        inside_k = (k < K)[None, :]
        for block in tl.range(0, tl.cdiv(rows, BLOCK_M), num_stages=STAGES):
            inside = (m < rows - block * BLOCK_M)[:, None]
            a_values = tl.load(a_tile, mask=inside & inside_n, other=0.0)
            b_values = tl.load(b_tile, mask=inside & inside_k, other=0.0)
            total = tl.dot(tl.trans(a_values), b_values, total)
            a_tile += BLOCK_M * N
            b_tile += BLOCK_M * K
    else:
        corner = first_tile.to(tl.int64) * ROWS
        if TOGETHER:
            depth = TOTAL
            corner_a = corner
            corner_b = corner
        else:
            depth = ROWS if TILED else tiles * ROWS
            corner_a = corner * N
            corner_b = corner * K
        # Columns past the end are clamped rather than masked: their results are not stored.
        read_n = tl.minimum(tl.arange(0, BLOCK_N), N - tile_n * BLOCK_N - 1)
        read_k = tl.minimum(tl.arange(0, BLOCK_K), K - tile_k * BLOCK_K - 1)
        a_tile = (
            a
            + corner_a
            + (tile_n * BLOCK_N).to(tl.int64) * depth
            + (read_n.to(tl.int64)[:, None] * depth + m[None, :])
        )
        b_tile = (
            b
            + corner_b
            + (tile_k * BLOCK_K).to(tl.int64) * depth
            + (read_k.to(tl.int64)[None, :] * depth + m[:, None])
        )
        if SCALING == _BY_BLOCK:
            sa = scale_a + first_tile.to(tl.int64) * N + tile_n * BLOCK_N + read_n
            sb = scale_b + first_tile.to(tl.int64) * K + tile_k * BLOCK_K + read_k
        for block in tl.range(0, tiles * (ROWS // BLOCK_M), num_stages=STAGES):
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
            if SCALING == _BY_BLOCK:
                by_row = tl.load(sa + tl.cast(block, tl.int64) * N)
                by_column = tl.load(sb + tl.cast(block, tl.int64) * K)
                total += tl.dot(a_values, b_values) * by_row[:, None] * by_column[None, :]
            else:
                total = tl.dot(a_values, b_values, total, max_num_imprecise_acc=IMPRECISE)
            a_tile += N * ROWS if TILED else BLOCK_M
            b_tile += K * ROWS if TILED else BLOCK_M
        if SCALING == _BY_TENSOR:
            total = total * tl.load(scale_a + group * SLOT) * tl.load(scale_b + group * SLOT)
    corner = tl.cast(tile_n * BLOCK_N, tl.int64) * K + tile_k * BLOCK_K
    places = matrix_base(out, table, group, tl.cast(N, tl.int64) * K) + corner
    places += tl.arange(0, BLOCK_N)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ACCUMULATE:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_sums_kernel(
    x, layout, sums, N, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute sums [GROUPS, N] over every group's rows in x [total, N], in float32 and in a fixed order."""
    group = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    start, rows, _, _ = rows_of_group(layout, group, GROUPS)
    matrix = x + start.to(tl.int64) * N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, rows, BLOCK_M):
        inside = (first + m < rows)[:, None] & (n < N)[None, :]
        places = matrix + ((first + m).to(tl.int64)[:, None] * N + n[None, :])
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + group.to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)


@functools.lru_cache(maxsize=4096)
def product_of_rows(
    total: int,
    width: int,
    depth: int,
    groups: int,
    *,
    scaling: int,
    exact: bool = False,
    transposed: bool = False,
    by_address: bool = False,
    clears: bool = False,
    row_major: bool = False,
    shared_memory: int = 1 << 30,
    hopper: bool = True,
) -> Launch:
    """Launch (a [total, depth], b, table | None, scale_a, scale_b, bias | None, layout) -> out.

    out is [total, width], and bias is [groups, width].

    Args:
        by_address: b is one of the table's matrices.
        clears: Rows after the last group become zero; otherwise they are not written.
        row_major: Block scales of a are [total, ceil(depth / 128)]; otherwise each group's scales are transposed.
        hopper: The GPU has Hopper's matrix instructions, which four warps execute together.
    """
    block_n, block_k, band, stages, warps = _tile_of_rows(width, scaling, shared_memory, hopper)
    even = depth % block_k == 0 and (not transposed or width % block_n == 0)
    tiles_m = tiles_at_most(total, groups) + clears
    return Launch(
        rows_kernel,
        (tiles_m * ceil_div(width, block_n), 1, 1),
        (Output((total, width), None),),
        (width, depth, tiles_m, total if clears else 0),
        (
            groups,
            scaling,
            block_k if exact else None,
            transposed,
            block_n,
            block_k,
            band,
            stages,
            even,
            clears,
            row_major,
        ),
        warps,
        tables=(AddressTable(2, (READ,)),) if by_address else (),
    )


@functools.lru_cache(maxsize=4096)
def product_of_columns(
    width: int,
    depth: int,
    groups: int,
    *,
    scaling: int,
    exact: bool = False,
    accumulates: bool = False,
    by_address: bool = False,
    together: int = 0,
    tiled: bool = False,
    shared_memory: int = 1 << 30,
    hopper: bool = True,
) -> Launch:
    """Launch (a, b, scale_a, scale_b, layout, table of results | None) -> out [groups, width, depth].

    Args:
        together: Total rows in all groups, if their codes are one matrix [width, together] and one [depth, together];
            with 0, each group's codes are contiguous.
        tiled: The codes are [width, 128] and [depth, 128] for every tile of 128 rows.
        by_address: The table's matrices are written; out is one table matrix, for its dtype.
        accumulates: Add to the values in out.
        hopper: See `product_of_rows`.
    """
    tile = _tile_of_columns(scaling, accumulates, shared_memory, hopper)
    block_n, block_k, block_m, band, stages, warps = tile
    assert not tiled or (block_m == ROWS.value and not together)
    programs = groups * ceil_div(width, block_n) * ceil_div(depth, block_k)
    return Launch(
        columns_kernel,
        (programs, 1, 1),
        () if by_address or accumulates else (Output((groups, width, depth), None),),
        (width, depth, together),
        (
            groups,
            scaling,
            block_m if exact else None,
            accumulates,
            block_n,
            block_k,
            block_m,
            band,
            stages,
            together > 0,
            tiled,
        ),
        warps,
        in_place=(6,) if accumulates and not by_address else (),
        tables=(AddressTable(5, (WRITTEN,)),) if by_address else (),
    )


@functools.lru_cache(maxsize=1024)
def row_sums(width: int, groups: int) -> Launch:
    """Launch (x [total, width], layout) -> sums float32 [groups, width]."""
    grid = (groups, ceil_div(width, 128), 1)
    outputs = (Output((groups, width), "float32"),)
    return Launch(row_sums_kernel, grid, outputs, (width,), (groups, 32, 128), warps=4)


# Off Hopper, 128 x 128 sums of tensor-scaled FP8 products in 4 warps' registers spill 392 to 672 bytes.
_WARPS = 8
_LARGE = 200 << 10  # shared-memory bytes for four wide-tile stages


def _tile_of_rows(
    width: int, scaling: int, shared_memory: int, hopper: bool
) -> tuple[int, int, int, int, int]:
    """Choose (columns, depth, tiles per band, stages, warps) for a program's 128-row tile."""
    # H200, TFLOP/s, 64 groups with 512 x 1408 x 2048 and 8 with 2048 x 4096 x 2048: bfloat16 128 columns, 3 stages, 4
    # warps 641 and 687, 256 columns, 4 stages, 8 warps 597 and 713; e4m3 fast 128 columns 1065 and 1174, 256 1000 and
    # 1182; promoted 884 and 949, 387 and 508; block scales 64 columns, 4 warps 725 and 766, 128 columns, 8 warps 691
    # and 727.
    if scaling == UNSCALED:
        return (
            (256, 64, 8, 4, 8)
            if width % 256 == 0 and shared_memory > _LARGE
            else (128, 64, 4, 3, 4)
        )
    if scaling == BLOCK_SCALES:
        return (64, 128, 8, 4 if shared_memory > _LARGE else 3, 4)
    return (128, 128, 8, 3, 4 if hopper else _WARPS)


def _tile_of_columns(
    scaling: int, accumulates: bool, shared_memory: int, hopper: bool
) -> tuple[int, int, int, int, int, int]:
    """Choose (result rows, result columns, contracted rows per step, tiles per band, stages, warps)."""
    # H200, TFLOP/s, the same shapes: bfloat16 256 columns 502 and 712, 128 columns 473 and 620; e4m3 promoted 601
    # and 949, 256 columns 353 and 472; block scales 64 x 128 with 4 warps 472 and 676, 128 x 128 with 8 316 and 449.
    if scaling == UNSCALED:
        # Off Hopper, the large tile spills 440 bytes where it adds to the result. 4 warps of the small tile spill up to
        # 144 bytes with Triton 3.6, and 328 where they add; 8 spill none.
        large = shared_memory > _LARGE and (hopper or not accumulates)
        return (128, 256, 64, 4, 4, 8) if large else (128, 128, 64, 4, 3, 8)
    if scaling == BLOCK_SCALES:
        return (64, 128, 128, 8, 3, 4)
    return (128, 128, 128, 4, 3, 4 if hopper else _WARPS)

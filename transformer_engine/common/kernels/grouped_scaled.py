"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e of MXFP8 codes, for groups of rows.

Matrix instructions read the exponents (`scaled_product.py`), which are row-major here: a group may begin at any row of
a tile of swizzled scales. The positions of the groups are in a tensor on the device (`grouped_layout`).
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .grouped_gemm import base_of
from .grouped_layout import ROWS, group_of_tile, rows_of_group, tiles_at_most
from .launch import WRITTEN, AddressTable, Launch, Output

_LENGTH = 32
LENGTH = tl.constexpr(_LENGTH)  # elements of an exponent


@triton.jit
def rows_kernel(
    a,
    b,
    layout,
    scale_a,
    scale_b,
    bias,
    out,
    N,
    K,
    TILES_M,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """Compute out [total, N]: rows of group e are a's rows [.., K] @ b_e [N, K].T; b [GROUPS, N, K].

    Args:
        scale_a: Exponents [total, K / 32].
        scale_b: Exponents [GROUPS, N, K / 32].
        EVEN: K is a multiple of BLOCK_K.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), TILES_M, tl.cdiv(N, BLOCK_N), BAND)
    k = tl.arange(0, BLOCK_K)
    s = tl.arange(0, BLOCK_K // LENGTH)
    m = tl.arange(0, ROWS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    group = group_of_tile(layout, tile_m, GROUPS)
    if group >= GROUPS:
        return
    start, rows, first_tile, _ = rows_of_group(layout, group, GROUPS)
    first_m = (tile_m - first_tile) * ROWS
    corner = (start + first_m).to(tl.int64)
    # Rows past the end are clamped rather than masked: their results are not stored.
    row_a = corner + tl.minimum(m, rows - first_m - 1)
    row_b = group.to(tl.int64) * N + tl.minimum(n, N - 1)
    columns = K // LENGTH
    a_tile = a + (row_a[:, None] * K + k[None, :])
    b_tile = b + (row_b[:, None] * K + k[None, :])
    a_scale = scale_a + (row_a[:, None] * columns + s[None, :])
    b_scale = scale_b + (row_b[:, None] * columns + s[None, :])
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        if EVEN:
            a_codes = tl.load(a_tile)
            b_codes = tl.load(b_tile)
            a_scales = tl.load(a_scale)
            b_scales = tl.load(b_scale)
        else:
            inside = (k < K - block * BLOCK_K)[None, :]
            exists = (s < columns - block * (BLOCK_K // LENGTH))[None, :]
            a_codes = tl.load(a_tile, mask=inside, other=0.0)
            b_codes = tl.load(b_tile, mask=inside, other=0.0)
            a_scales = tl.load(a_scale, mask=exists, other=0)
            b_scales = tl.load(b_scale, mask=exists, other=0)
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
        a_scale += BLOCK_K // LENGTH
        b_scale += BLOCK_K // LENGTH
    if bias is not None:
        added = tl.load(bias + group.to(tl.int64) * N + n, mask=n < N, other=0.0)
        total += added.to(tl.float32)[None, :]
    places = out + corner * N + (m[:, None] * N + n[None, :])
    tl.store(places, total.to(out.dtype.element_ty), mask=(m < rows - first_m)[:, None] & (n < N)[None, :])


@triton.jit
def columns_kernel(
    a,
    b,
    scale_a,
    scale_b,
    layout,
    table,
    out,
    TOTAL,
    N,
    K,
    GROUPS: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute out_e [N, K] = sum over the rows of group e of a [N, TOTAL] and b [K, TOTAL]; groups have 32 i rows.

    Args:
        scale_a: Exponents [N, TOTAL / 32].
        scale_b: Exponents [K, TOTAL / 32].
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // (tiles_n * tiles_k)
    tile_n, tile_k = tile.position(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, BAND)
    start, rows, _, _ = rows_of_group(layout, group, GROUPS)
    # Multiples that the compiler sees, for loads of 16 bytes and their masks.
    first_s = start // LENGTH
    start = first_s * LENGTH
    rows = rows // LENGTH * LENGTH
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    s = tl.arange(0, BLOCK_M // LENGTH)
    # Columns past the end are clamped rather than masked: their results are not stored.
    # Offsets inside a tile have 32 bits, because TOTAL is below LARGEST_EXTENT.
    read_n = tl.minimum(tl.arange(0, BLOCK_N), N - tile_n * BLOCK_N - 1)
    read_k = tl.minimum(tl.arange(0, BLOCK_K), K - tile_k * BLOCK_K - 1)
    width = TOTAL // LENGTH
    corner_n = (tile_n * BLOCK_N).to(tl.int64)
    corner_k = (tile_k * BLOCK_K).to(tl.int64)
    a_tile = a + (corner_n * TOTAL + start) + (read_n[:, None] * TOTAL + m[None, :])
    b_tile = b + (corner_k * TOTAL + start) + (read_k[:, None] * TOTAL + m[None, :])
    a_scale = scale_a + (corner_n * width + first_s) + (read_n[:, None] * width + s[None, :])
    b_scale = scale_b + (corner_k * width + first_s) + (read_k[:, None] * width + s[None, :])
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(rows, BLOCK_M), num_stages=STAGES):
        inside = (m < rows - block * BLOCK_M)[None, :]
        exists = (s < (rows - block * BLOCK_M) // LENGTH)[None, :]
        a_codes = tl.load(a_tile, mask=inside, other=0.0)
        b_codes = tl.load(b_tile, mask=inside, other=0.0)
        a_scales = tl.load(a_scale, mask=exists, other=0)
        b_scales = tl.load(b_scale, mask=exists, other=0)
        a_scale += BLOCK_M // LENGTH
        b_scale += BLOCK_M // LENGTH
        total = tl.dot_scaled(a_codes, a_scales, FORMAT_A, b_codes.T, b_scales, FORMAT_B, total)
        a_tile += BLOCK_M
        b_tile += BLOCK_M
    places = base_of(out, table, group, tl.cast(N, tl.int64) * K) + (n[:, None].to(tl.int64) * K + k[None, :])
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ACCUMULATE:
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)


# Tiles of 128 x 128 with 8 warps, of 128 elements per step: tcgen05.mma on 10.x and 11.0 with at least 128 rows, and
# mma.sync without stack on 12.x; three stages fit its 99 KiB. Compiled with Triton 3.7.
_SIDE, _STEP, _STAGES, _WARPS = 128, 128, 3, 8


@functools.lru_cache(maxsize=4096)
def product_of_rows(total: int, width: int, depth: int, groups: int, elements: tuple[str, str]) -> Launch:
    """Return the launch (a [total, depth], b, layout, scale_a, scale_b, bias | None) -> out [total, width].

    Args:
        elements: Elements of both operands, "e4m3" or "e5m2".
    """
    tiles_m = tiles_at_most(total, groups)
    return Launch(
        rows_kernel,
        (tiles_m * ceil_div(width, _SIDE), 1, 1),
        (Output((total, width), None),),
        (width, depth, tiles_m),
        (depth % _STEP == 0, groups, _STAGES, *elements, _SIDE, _STEP, 8),
        _WARPS,
    )


@functools.lru_cache(maxsize=4096)
def product_of_columns(
    total: int, width: int, depth: int, groups: int, elements: tuple[str, str],
    *, accumulates: bool = False, by_address: bool = False,
) -> Launch:  # fmt: skip
    """Return the launch (a, b, scale_a, scale_b, layout, table of results | None) -> out [groups, width, depth].

    Args:
        elements: Elements of both operands, "e4m3" or "e5m2".
        accumulates: Add to the values of out.
        by_address: The table's matrices are written; out is one of them, for its dtype.
    """
    grid = (groups * ceil_div(width, _SIDE) * ceil_div(depth, _SIDE), 1, 1)
    outputs = () if by_address or accumulates else (Output((groups, width, depth), None),)
    constants = (groups, *elements, accumulates, _SIDE, _SIDE, _STEP, 8, _STAGES)
    return Launch(
        *(columns_kernel, grid, outputs, (total, width, depth), constants, _WARPS),
        in_place=(6,) if accumulates and not by_address else (),
        tables=(AddressTable(5, (WRITTEN,)),) if by_address else (),
    )

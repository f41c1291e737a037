"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e from FP8 codes in 128-element blocks.

Written in Gluon, Triton's explicit language, for Hopper (capability 9.0). Programs, warps and tiles are as in
`grouped_product`; the copy engine also loads the scales for each 128 elements along the contracted axis. Each such
product is multiplied by its scales and added to a float32 sum, as in `block_product`. Sums have `grouped_gemm`'s bits.
"""

from __future__ import annotations

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..formats import ceil_div
from .block_product import (
    REGISTERS,
    added,
    load_tile,
    stage_barriers,
    wait_for_free_stage,
    wait_for_full_stage,
)
from .grouped_layout import TILE_ROWS, tiles_at_most
from .grouped_product import (
    CODE_BYTES,
    HALF,
    SIDE,
    TILE_COLUMNS,
    count_rows,
    locate,
    map_codes,
    skip_stages,
    write_tile,
)
from .launch import WRITTEN, AddressTable, Launch, Output

ALIGNMENT = gl.constexpr(4)  # the copy engine reads scales at multiples of 16 bytes
# Triton 3.7 renamed it.
synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def fetch(
    matrices,
    scales,
    scale_pointer,
    stages,
    barriers,
    layout,
    TILES,
    TILES_M,
    TOTAL,
    M,
    N,
    K,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Load every tile's codes and scales, 128 elements along the contracted axis per stage, once a stage is free.

    The warp itself loads scales that do not begin at multiples of 16 bytes.
    """
    a, b = matrices
    scale_a, scale_b = scales
    a_stages, b_stages, scale_a_stages, scale_b_stages = stages
    full, free = barriers
    SCALE_BYTES: gl.constexpr = 4 * SIDE + (8 * SIDE if COLUMNS else 0)
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    step = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        group, row, tile_n, steps, first_tile, _ = locate(
            tile, layout, TILES_M, N, K, GROUPS, BAND, COLUMNS
        )
        start = 0
        height = M
        aligned = TILES > 0
        if not COLUMNS:
            # A group's scales are [steps, height], and begin behind the scales for all earlier rows.
            start = gl.load(layout + group)
            height = gl.load(layout + group + 1) - start
            aligned = (start * steps | height) % ALIGNMENT == 0
        n = tile_n * 2 * SIDE
        both = n + SIDE < N  # otherwise no column belongs to the second group of warps
        for block in range(steps):
            row_a, row_b, column = row, group * N + n, block * SIDE
            first_scale = start * steps + block * height + row - start
            place = wait_for_free_stage(free, step, STAGES)
            arrived = full.index(place)
            if not aligned:
                at = first_scale + gl.arange(0, SIDE, LINE)
                values = gl.load(scale_pointer + at, mask=at < steps * TOTAL, other=0.0)
                scale_a_stages.index(place).store(values)
                synchronize()
            mbarrier.expect(arrived, 3 * CODE_BYTES + SCALE_BYTES, pred=both & aligned)
            mbarrier.expect(arrived, 2 * CODE_BYTES + SCALE_BYTES, pred=(both == 0) & aligned)
            mbarrier.expect(arrived, 3 * CODE_BYTES, pred=both & (aligned == 0))
            mbarrier.expect(arrived, 2 * CODE_BYTES, pred=(both == 0) & (aligned == 0))
            if COLUMNS:
                row_a, row_b, column = (
                    (first_tile + block) * M + row,
                    (first_tile + block) * N + n,
                    0,
                )
                first_scale = row_a
                load_tile(scale_b, [row_b], arrived, scale_b_stages.index(place))
            load_tile(scale_a, [first_scale], arrived, scale_a_stages.index(place), pred=aligned)
            load_tile(a, [row_a, column], arrived, a_stages.index(place))
            load_tile(b, [row_b, column], arrived, b_stages.index(2 * place))
            load_tile(b, [row_b + SIDE, column], arrived, b_stages.index(2 * place + 1), pred=both)
            step += 1


@gluon.jit
def column_scales(
    stages, place, otherwise, LAYOUT: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr
):
    """Load the scales for 128 columns if they differ; otherwise return `otherwise`."""
    if COLUMNS:
        return stages.index(place).slice(GROUP * SIDE, SIDE).load(gl.SliceLayout(0, LAYOUT))
    else:
        return otherwise


@gluon.jit
def multiply(
    results,
    out,
    scale_b,
    bias,
    table,
    stages,
    buffers,
    barriers,
    layout,
    TILES,
    TILES_M,
    M,
    N,
    K,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Compute the columns [128 GROUP, 128 GROUP + 128) in every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    RIGHT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    a_stages, b_stages, scale_a_stages, scale_b_stages = stages
    full, free = barriers
    step = 0
    never = TILES < 0  # always false, which the assembler cannot know; see `block_product.added`
    product = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        group, row, tile_n, steps, _, rows = locate(
            tile, layout, TILES_M, N, K, GROUPS, BAND, COLUMNS
        )
        n = tile_n * 2 * SIDE + GROUP * SIDE
        if n < N:
            squares = scale_b
            square = 1.0
            if not COLUMNS:
                squares = scale_b + (group * gl.cdiv(N, SIDE) + n // SIDE) * gl.cdiv(K, SIDE)
                square = gl.load(squares)
            upper = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
            lower = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
            for block in range(steps):
                place = wait_for_full_stage(full, step, STAGES)
                codes, by_rows = a_stages.index(place), scale_a_stages.index(place)
                first, second = (
                    by_rows.slice(0, HALF).load(RIGHT),
                    by_rows.slice(HALF, HALF).load(RIGHT),
                )
                first, second = first * square, second * square
                b = b_stages.index(2 * place + GROUP).permute((1, 0))
                product = hopper.warpgroup_mma(
                    codes.slice(0, HALF), b, product, use_acc=never, is_async=True
                )
                if not COLUMNS:
                    square = gl.load(squares + min(block + 1, steps - 1))
                product = hopper.warpgroup_mma_wait(0, deps=[product])
                by_column = column_scales(scale_b_stages, place, first, LAYOUT, GROUP, COLUMNS)
                upper = added(upper, product, first, by_column, COLUMNS)
                product = hopper.warpgroup_mma(
                    codes.slice(HALF, HALF), b, product, use_acc=never, is_async=True
                )
                product = hopper.warpgroup_mma_wait(0, deps=[product])
                by_column = column_scales(scale_b_stages, place, second, LAYOUT, GROUP, COLUMNS)
                mbarrier.arrive(free.index(place), count=1)
                lower = added(lower, product, second, by_column, COLUMNS)
                step += 1
            write_tile(
                results,
                out,
                upper,
                lower,
                None,
                bias,
                table,
                buffers,
                group,
                row,
                rows,
                n,
                M,
                N,
                GROUP,
                BUFFERS,
                LAYOUT,
                COLUMNS,
                ACCUMULATE,
            )
        else:
            step = skip_stages(full, free, step, steps, STAGES)
    tma.store_wait(0)


@gluon.jit
def grouped_block_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    layout,
    table,
    out,
    TILES,
    TILES_M,
    TOTAL,
    M,
    N,
    K,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Compute each group's rows, or with COLUMNS the gradient of each group's matrix.

    Rows: out [TOTAL, N] = a [TOTAL, K] @ b_e.T, b [GROUPS, N, K], bias [GROUPS, N]. Columns: out [GROUPS, M, N] from
    the tiles a [tiles, M, 128] and b [tiles, N, 128].

    Args:
        scale_a: Rows: group after group, [ceil(K / 128), rows]. Columns: [tiles, M].
        scale_b: Rows: [GROUPS, ceil(N / 128), ceil(K / 128)]. Columns: [tiles, N].
        table: Addresses for the matrices [M, N] to write instead of out, whose dtype they have; or None.
        BUFFERS: Number of 64-row result buffers per warp group.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, SIDE], out.dtype.element_ty)
    rows_a, rows_b, rows_out = count_rows(layout, TOTAL, M, N, GROUPS, COLUMNS)
    matrices = map_codes(a, b, rows_a, rows_b, SIDE if COLUMNS else K, CODES)
    scales_a = rows_a if COLUMNS else TOTAL * gl.cdiv(K, SIDE)
    of_rows = tma.make_tensor_descriptor(scale_a, [scales_a], [1], [SIDE], LINE)
    scales = (of_rows, of_rows)
    if COLUMNS:
        scales = (of_rows, tma.make_tensor_descriptor(scale_b, [rows_b], [1], [2 * SIDE], LINE))
    results = tma.make_tensor_descriptor(out, [rows_out, N], [N, 1], [HALF, SIDE], RESULT)
    stages = (
        gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, SIDE, SIDE], CODES),
        gl.allocate_shared_memory(b.dtype.element_ty, [2 * STAGES, SIDE, SIDE], CODES),
        gl.allocate_shared_memory(gl.float32, [STAGES, SIDE], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES if COLUMNS else 1, 2 * SIDE], LINE),
    )
    buffers = gl.allocate_shared_memory(out.dtype.element_ty, [2 * BUFFERS, HALF, SIDE], RESULT)
    barriers = stage_barriers(STAGES)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    results,
                    out,
                    scale_b,
                    bias,
                    table,
                    stages,
                    buffers,
                    barriers,
                    layout,
                    TILES,
                    TILES_M,
                    M,
                    N,
                    K,
                    0,
                    GROUPS,
                    STAGES,
                    BUFFERS,
                    BAND,
                    COLUMNS,
                    ACCUMULATE,
                ),
            ),
            (
                multiply,
                (
                    results,
                    out,
                    scale_b,
                    bias,
                    table,
                    stages,
                    buffers,
                    barriers,
                    layout,
                    TILES,
                    TILES_M,
                    M,
                    N,
                    K,
                    1,
                    GROUPS,
                    STAGES,
                    BUFFERS,
                    BAND,
                    COLUMNS,
                    ACCUMULATE,
                ),
            ),
            (
                fetch,
                (
                    matrices,
                    scales,
                    scale_a,
                    stages,
                    barriers,
                    layout,
                    TILES,
                    TILES_M,
                    TOTAL,
                    M,
                    N,
                    K,
                    GROUPS,
                    STAGES,
                    BAND,
                    COLUMNS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


_STAGES = 3
_BAND = 8  # tile rows that are visited together


def _buffers(dtype: str) -> int:
    """Buffers per warp group: as many as the stages leave room for in 227 KiB of shared memory."""
    return 1 if dtype == "float32" else 2


@functools.lru_cache(maxsize=4096)
def product_of_rows(
    total: int, width: int, depth: int, groups: int, dtype: str, *, processors: int
) -> Launch:
    """Launch (a [total, depth], b, scale_a, scale_b, bias | None, layout, None) -> out [total, width].

    out has the dtype, b is [groups, width, depth], bias is [groups, width]; see `grouped_block_kernel` for the scales.
    Extents are multiples of 16.

    Args:
        processors: Number of multiprocessors on the GPU.
    """
    tiles_m = tiles_at_most(total, groups)
    tiles = tiles_m * ceil_div(width, TILE_COLUMNS)
    return Launch(
        grouped_block_kernel,
        (min(tiles, processors), 1, 1),
        (Output((total, width), dtype),),
        (tiles, tiles_m, total, 0, width, depth),
        (groups, _STAGES, _buffers(dtype), _BAND, False, False),
        warps=4,
        registers=REGISTERS,
    )


@functools.lru_cache(maxsize=4096)
def product_of_columns(
    width: int,
    depth: int,
    groups: int,
    dtype: str,
    *,
    processors: int,
    accumulates: bool = False,
    by_address: bool = False,
) -> Launch:
    """Launch (a, b, scale_a, scale_b, None, layout, table | None) -> out [groups, width, depth] in dtype.

    a is [tiles, width, 128] and b [tiles, depth, 128]: the codes for 128 rows per tile, each group's codes together.
    Their scales are [tiles, width] and [tiles, depth].

    Args:
        processors: Number of multiprocessors on the GPU.
        accumulates: Add to the values in out, float32.
        by_address: The table's matrices are written; out is one table matrix, for its dtype.
    """
    assert not accumulates or dtype == "float32", "a sum is rounded once, from float32"
    tiles_m = ceil_div(width, TILE_ROWS)
    tiles = groups * tiles_m * ceil_div(depth, TILE_COLUMNS)
    return Launch(
        grouped_block_kernel,
        (min(tiles, processors), 1, 1),
        () if by_address or accumulates else (Output((groups, width, depth), dtype),),
        (tiles, tiles_m, 0, width, depth, 0),
        (groups, _STAGES, _buffers(dtype), _BAND, True, accumulates),
        warps=4,
        registers=REGISTERS,
        in_place=(7,) if accumulates and not by_address else (),
        tables=(AddressTable(6, (WRITTEN,)),) if by_address else (),
    )

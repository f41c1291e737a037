"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e from FP8 codes with one scale per group.

Written in Gluon, Triton's explicit language, for Hopper (capability 9.0). A program computes one tile of 128 rows and
256 columns after another. One warp loads: the copy engine writes 128 of the contracted axis at a time to a stage ring.
Two groups of four warps multiply 128 columns each, 64 rows at a time. While they write a tile, the first stages
of the next tile are loading, which matters if the contracted axis is short: the tokens of one expert.

A column product's codes are 128-row tiles [width, 128] (`grouped_cast`, tiled), so that one tensor map describes all
groups' codes, whatever their sizes. Sums have the bits of `grouped_gemm`, which computes the same products on every GPU
with FP8 tensor cores.
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
    load_tile,
    stage_barriers,
    store_tile,
    tile_position,
    wait_for_free_stage,
    wait_for_full_stage,
)
from .grouped_gemm import SLOT
from .grouped_layout import TILE_ROWS, tiles_at_most
from .launch import WRITTEN, AddressTable, Launch, Output

SIDE = gl.constexpr(TILE_ROWS)  # rows per tile, depth per stage, and columns per warp group
HALF = gl.constexpr(64)  # rows per instruction
CODE_BYTES = gl.constexpr(TILE_ROWS * TILE_ROWS)
TILE_COLUMNS = 2 * TILE_ROWS


@gluon.jit
def locate(
    tile, layout, TILES_M, N, K, GROUPS: gl.constexpr, BAND: gl.constexpr, COLUMNS: gl.constexpr
):
    """Locate a tile.

    The place is: group, first row in the left codes, tile column, steps along the contracted axis, the group's first
    128-row tile, and result row count, which is 0 for a tile that does not exist.
    """
    tiles_n = gl.cdiv(N, 2 * SIDE)
    if COLUMNS:
        group = tile // (TILES_M * tiles_n)
        tile_m, tile_n = tile_position(tile % (TILES_M * tiles_n), TILES_M, tiles_n, BAND)
        first_tile = gl.load(layout + GROUPS + 1 + group)
        steps = gl.load(layout + GROUPS + 2 + group) - first_tile
        return group, tile_m * SIDE, tile_n, steps, first_tile, SIDE + 0 * tile
    else:
        tile_m, tile_n = tile_position(tile, TILES_M, tiles_n, BAND)
        found = gl.load(layout + 2 * (GROUPS + 1) + tile_m)
        exists = found < GROUPS
        group = min(found, GROUPS - 1)
        start = gl.load(layout + group)
        first_tile = gl.load(layout + GROUPS + 1 + group)
        first = (tile_m - first_tile) * SIDE
        steps = gl.where(exists, gl.cdiv(K, SIDE), 0)
        rows = gl.where(exists, gl.load(layout + group + 1) - start - first, 0)
        return group, start + first, tile_n, steps, first_tile, rows


@gluon.jit
def fetch(
    matrices,
    stages,
    barriers,
    layout,
    TILES,
    TILES_M,
    M,
    N,
    K,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Load every tile's codes, 128 elements along the contracted axis per stage, as soon as a stage is free."""
    a, b = matrices
    a_stages, b_stages = stages
    full, free = barriers
    step = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        group, row, tile_n, steps, first_tile, _ = locate(
            tile, layout, TILES_M, N, K, GROUPS, BAND, COLUMNS
        )
        n = tile_n * 2 * SIDE
        both = n + SIDE < N  # otherwise no column belongs to the second group of warps
        for block in range(steps):
            place = wait_for_free_stage(free, step, STAGES)
            arrived = full.index(place)
            mbarrier.expect(arrived, 3 * CODE_BYTES, pred=both)
            mbarrier.expect(arrived, 2 * CODE_BYTES, pred=both == 0)
            if COLUMNS:
                row_a, row_b, column = (
                    (first_tile + block) * M + row,
                    (first_tile + block) * N + n,
                    0,
                )
            else:
                row_a, row_b, column = row, group * N + n, block * SIDE
            load_tile(a, [row_a, column], arrived, a_stages.index(place))
            load_tile(b, [row_b, column], arrived, b_stages.index(2 * place))
            load_tile(b, [row_b + SIDE, column], arrived, b_stages.index(2 * place + 1), pred=both)
            step += 1


@gluon.jit
def added(total, product):
    """Compute total + product at this point of the program; see `block_product.added`."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [total + product], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def skip_stages(full, free, step, steps, STAGES: gl.constexpr):
    """Free the next stages without reading them, and return the step behind them."""
    for _ in range(steps):
        place = wait_for_full_stage(full, step, STAGES)
        mbarrier.arrive(free.index(place), count=1)
        step += 1
    return step


@gluon.jit
def write(
    results,
    out,
    total,
    scales,
    bias,
    first,
    rows,
    m,
    n,
    N,
    buffer,
    LAYOUT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    BY_ADDRESS: gl.constexpr,
):
    """Write total [64, 128] to rows first + m of out, of which those below `rows` exist, and columns n.

    Args:
        scales: Two factors, or None. The last one and the bias form one fused multiply-add, as in `grouped_gemm`.
    """
    if scales is not None:
        total = total * scales[0] * scales[1]
    if bias is not None:
        columns = n + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
        total += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    buffer.store(total.to(buffer.dtype))
    if ACCUMULATE or BY_ADDRESS or m + HALF > rows:
        # Through pointers, since the copy engine would write the next group's rows; 32 rows at a time spill nothing.
        WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        PART: gl.constexpr = HALF // 2
        r = gl.arange(0, PART, gl.SliceLayout(1, WIDE))
        c = gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
        for part in gl.static_range(2):
            top = m + part * PART
            places = out + (first + top).to(gl.int64) * N + n + (r[:, None] * N + c[None, :])
            inside = (top + r < rows)[:, None] & (n + c < N)[None, :]
            if ACCUMULATE:
                before = gl.load(places, mask=inside, other=0.0)
                gl.store(places, buffer.slice(part * PART, PART).load(WIDE) + before, mask=inside)
            else:
                gl.store(places, buffer.slice(part * PART, PART).load(WIDE), mask=inside)
    else:
        hopper.fence_async_shared()
        store_tile(results, [first + m, n], buffer)


@gluon.jit
def write_tile(
    results,
    out,
    upper,
    lower,
    scales,
    bias,
    table,
    buffers,
    group,
    row,
    rows,
    n,
    M,
    N,
    GROUP: gl.constexpr,
    BUFFERS: gl.constexpr,
    LAYOUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Write a tile's 64 upper and 64 lower rows, from row `row` in the group's codes on."""
    matrix = out
    first = row
    if COLUMNS:
        first = group * M + row
        rows = M - row
        if table is not None:
            first = row
            address = gl.load(table + group).to(gl.pointer_type(out.dtype.element_ty))
            matrix = gl.multiple_of(address, 16)
    added_row = bias
    if bias is not None:
        added_row = bias + group.to(gl.int64) * N
    BY_ADDRESS: gl.constexpr = table is not None
    tma.store_wait(0)
    write(
        results,
        matrix,
        upper,
        scales,
        added_row,
        first,
        rows,
        0,
        n,
        N,
        buffers.index(GROUP * BUFFERS),
        LAYOUT,
        ACCUMULATE,
        BY_ADDRESS,
    )
    if BUFFERS == 1:
        tma.store_wait(0)
    write(
        results,
        matrix,
        lower,
        scales,
        added_row,
        first,
        rows,
        HALF,
        n,
        N,
        buffers.index(GROUP * BUFFERS + BUFFERS - 1),
        LAYOUT,
        ACCUMULATE,
        BY_ADDRESS,
    )


@gluon.jit
def multiply(
    results,
    out,
    scale_a,
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
    EXACT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Compute the columns [128 GROUP, 128 GROUP + 128) in every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    a_stages, b_stages = stages
    full, free = barriers
    never = TILES < 0  # always false, which the assembler cannot know; see `block_product.added`
    product = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
    step = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        group, row, tile_n, steps, _, rows = locate(
            tile, layout, TILES_M, N, K, GROUPS, BAND, COLUMNS
        )
        n = tile_n * 2 * SIDE + GROUP * SIDE
        if n < N:
            upper = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
            lower = gl.zeros([HALF, SIDE], gl.float32, LAYOUT)
            for block in range(steps):
                place = wait_for_full_stage(full, step, STAGES)
                codes = a_stages.index(place)
                b = b_stages.index(2 * place + GROUP).permute((1, 0))
                if EXACT:
                    product = hopper.warpgroup_mma(
                        codes.slice(0, HALF), b, product, use_acc=never, is_async=True
                    )
                    product = hopper.warpgroup_mma_wait(0, deps=[product])
                    upper = added(upper, product)
                    product = hopper.warpgroup_mma(
                        codes.slice(HALF, HALF), b, product, use_acc=never, is_async=True
                    )
                    product = hopper.warpgroup_mma_wait(0, deps=[product])
                    mbarrier.arrive(free.index(place), count=1)
                    lower = added(lower, product)
                else:
                    upper = hopper.warpgroup_mma(codes.slice(0, HALF), b, upper, is_async=True)
                    lower = hopper.warpgroup_mma(codes.slice(HALF, HALF), b, lower, is_async=True)
                    # The products of this stage are running; the previous stage's products have completed.
                    upper, lower = hopper.warpgroup_mma_wait(2, deps=[upper, lower])
                    mbarrier.arrive(
                        free.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0
                    )
                step += 1
            if not EXACT:
                upper, lower = hopper.warpgroup_mma_wait(0, deps=[upper, lower])
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            by_a = gl.load(scale_a + group * SLOT)
            by_b = gl.load(scale_b + group * SLOT)
            write_tile(
                results,
                out,
                upper,
                lower,
                (by_a, by_b),
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
def count_rows(layout, TOTAL, M, N, GROUPS: gl.constexpr, COLUMNS: gl.constexpr):
    """Count the rows in the left codes, the right codes and the result, each as one matrix."""
    if COLUMNS:
        tiles = max(gl.load(layout + 2 * GROUPS + 1), 1)  # a tensor map has no empty axis
        return tiles * M, tiles * N, GROUPS * M
    else:
        return TOTAL, GROUPS * N, TOTAL


@gluon.jit
def map_codes(a, b, rows_a, rows_b, width, CODES: gl.constexpr):
    """Describe the codes as tensor maps, [rows, width] each."""
    return (
        tma.make_tensor_descriptor(a, [rows_a, width], [width, 1], [SIDE, SIDE], CODES),
        tma.make_tensor_descriptor(b, [rows_b, width], [width, 1], [SIDE, SIDE], CODES),
    )


@gluon.jit
def grouped_kernel(
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
    EXACT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):
    """Compute each group's rows, or with COLUMNS the gradient of each group's matrix.

    Rows: out [TOTAL, N] = a [TOTAL, K] @ b_e.T, b [GROUPS, N, K], bias [GROUPS, N]. Columns: out [GROUPS, M, N] from
    the tiles a [tiles, M, 128] and b [tiles, N, 128].

    Args:
        table: Addresses of the matrices [M, N] to write instead of out, whose dtype they have; or None.
        BUFFERS: Number of 64-row result buffers per warp group.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, SIDE], out.dtype.element_ty)
    rows_a, rows_b, rows_out = count_rows(layout, TOTAL, M, N, GROUPS, COLUMNS)
    matrices = map_codes(a, b, rows_a, rows_b, SIDE if COLUMNS else K, CODES)
    results = tma.make_tensor_descriptor(out, [rows_out, N], [N, 1], [HALF, SIDE], RESULT)
    stages = (
        gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, SIDE, SIDE], CODES),
        gl.allocate_shared_memory(b.dtype.element_ty, [2 * STAGES, SIDE, SIDE], CODES),
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
                    scale_a,
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
                    EXACT,
                    ACCUMULATE,
                ),
            ),
            (
                multiply,
                (
                    results,
                    out,
                    scale_a,
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
                    EXACT,
                    ACCUMULATE,
                ),
            ),
            (
                fetch,
                (
                    matrices,
                    stages,
                    barriers,
                    layout,
                    TILES,
                    TILES_M,
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


_BAND = 8  # tile rows that are visited together


def _memory(dtype: str, columns: bool) -> tuple[int, int]:
    """Number of stages, and of buffers per warp group, which fit 227 KiB of shared memory."""
    # H200, TFLOP/s for 64 groups with 512 x 1408 x 2048, bfloat16 results: 4 stages and 1 buffer, 3 stages and 2
    # buffers: columns 911 and 933, rows 1091 and 1027 (fast), 1074 and 1084 (promoted). `grouped_gemm`: 609, 1041 and
    # 809.
    if dtype == "float32":
        return 3, 1
    return (3, 2) if columns else (4, 1)


@functools.lru_cache(maxsize=4096)
def product_of_rows(
    total: int, width: int, depth: int, groups: int, dtype: str, *, exact: bool, processors: int
) -> Launch:
    """Launch (a [total, depth], b, scale_a, scale_b, bias | None, layout, None) -> out [total, width].

    out has the dtype, b is [groups, width, depth], scales are [groups, 4], bias is [groups, width]. Extents are
    multiples of 16.

    Args:
        exact: Promote partial sums to float32 every 128 of the depth.
        processors: Number of multiprocessors on the GPU.
    """
    tiles_m = tiles_at_most(total, groups)
    tiles = tiles_m * ceil_div(width, TILE_COLUMNS)
    return Launch(
        grouped_kernel,
        (min(tiles, processors), 1, 1),
        (Output((total, width), dtype),),
        (tiles, tiles_m, total, 0, width, depth),
        (groups, *_memory(dtype, False), _BAND, False, exact, False),
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
    exact: bool,
    processors: int,
    accumulates: bool = False,
    by_address: bool = False,
) -> Launch:
    """Launch (a, b, scale_a, scale_b, None, layout, table | None) -> out [groups, width, depth] in dtype.

    a is [tiles, width, 128] and b [tiles, depth, 128]: the codes for 128 rows per tile, each group's codes together.

    Args:
        exact: Promote the sum of every 128 rows to float32.
        processors: Number of multiprocessors on the GPU.
        accumulates: Add to the values in out, float32.
        by_address: The table's matrices are written; out is one table matrix, for its dtype.
    """
    assert not accumulates or dtype == "float32", "a sum is rounded once, from float32"
    tiles_m = ceil_div(width, TILE_ROWS)
    tiles = groups * tiles_m * ceil_div(depth, TILE_COLUMNS)
    return Launch(
        grouped_kernel,
        (min(tiles, processors), 1, 1),
        () if by_address or accumulates else (Output((groups, width, depth), dtype),),
        (tiles, tiles_m, 0, width, depth, 0),
        (groups, *_memory(dtype, True), _BAND, True, exact, accumulates),
        warps=4,
        registers=REGISTERS,
        in_place=(7,) if accumulates and not by_address else (),
        tables=(AddressTable(6, (WRITTEN,)),) if by_address else (),
    )

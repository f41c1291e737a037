"""out [M, N] = a [M, K] @ b [N, K].T for FP8 codes with one scale per 128-element block, on Hopper (capability 9.0).

Written in Gluon, Triton's explicit language. A program computes one tile after another, each with 256 rows and 128
columns.
One warp loads: the copy engine writes 128 of K at a time, codes and scales, to a stage ring. Two groups of four warps
multiply 128 rows each, 64 at a time, and add every 128 of K to a float32 sum. While one group adds, the tensor cores
multiply for the other; while both groups write a tile, the first stages of the next tile are loading.

H200, TFLOP/s, 8192 x 28672 x 4096, 8192 x 4096 x 28672 and, with one scale per row of b, 28672 x 4096 x 8192: 1124,
1165 and 903, measured alternately with cuBLASLt's 1123, 1183 and 934, and grouped_gemm.py's 718, 730 and 645.
Alternating groups account for 3 %; with one scale per row of b, adding takes as long as multiplying, and alternating
loses 8 %. Four stages, with one buffer for results and scales that the warps load themselves, lose 5 to 15 %.

`product_of_rows` and `product_of_columns` in grouped_gemm.py, which Triton schedules, compute the same products on
every GPU with FP8 tensor cores.
"""

from __future__ import annotations

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..formats import ceil_div
from .launch import Launch, Output

BLOCK = gl.constexpr(128)  # along K, and columns per tile
TILE_ROWS = 256
ROWS = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(64)  # rows per instruction: a warp group multiplies its 128 rows in two steps
# Triton 3.8 renamed the copies, and 3.9 removed their former names.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# Per thread at launch; later 24 in the warps that load, 240 in the warps that multiply.
REGISTERS = 168


@gluon.jit
def tile_position(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """Map a tile to (tile row, tile column): BAND tile rows at a time, each band column by column."""
    band = tile // (BAND * tiles_n)
    height = min(tiles_m - band * BAND, BAND)
    within = tile % (BAND * tiles_n)
    return band * BAND + within % height, within // height


@gluon.jit
def stage_barriers(STAGES: gl.constexpr):
    """Allocate the barriers (full, free) of every stage: a stage is filled by one warp, and read by two groups."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return full, free


@gluon.jit
def wait_for_free_stage(free, step, STAGES: gl.constexpr):
    """Wait until all warps have read the stage of a step, and return its index."""
    stage = step % STAGES
    # In the first round the stages are free: the phase before the first one counts as completed.
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def wait_for_full_stage(full, step, STAGES: gl.constexpr):
    """Wait until the stage of a step is loaded, and return its index."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    return stage


@gluon.jit
def fetch(
    matrices,
    scales,
    stages,
    barriers,
    M,
    N,
    K,
    BY_ROW: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """Load every tile's codes and scales, 128 of K per stage, as soon as both groups have read the stage."""
    a, b = matrices
    scale_a, scale_b = scales
    a_stages, b_stages, scale_a_stages, scale_b_stages = stages
    full, free, _ = barriers
    tiles_m, tiles_n, blocks = gl.cdiv(M, ROWS), gl.cdiv(N, BLOCK), gl.cdiv(K, BLOCK)
    SIZE: gl.constexpr = (ROWS + BLOCK) * BLOCK + 4 * ROWS + (4 * BLOCK if BY_ROW else 0)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, BAND)
        m, n = tile_m * ROWS, tile_n * BLOCK
        for block in range(blocks):
            stage = wait_for_free_stage(free, step, STAGES)
            arrived = full.index(stage)
            mbarrier.expect(arrived, SIZE)
            load_tile(a, [m, block * BLOCK], arrived, a_stages.index(stage))
            load_tile(b, [n, block * BLOCK], arrived, b_stages.index(stage))
            load_tile(scale_a, [block * M + m], arrived, scale_a_stages.index(stage))
            if BY_ROW:
                load_tile(scale_b, [block * N + n], arrived, scale_b_stages.index(stage))
            step += 1


@gluon.jit
def start_product(
    a, b, product, never, turns, GROUP: gl.constexpr, PHASE: gl.constexpr, BY_ROW: gl.constexpr
):
    """Start a @ b; if alternating is faster, wait for this group's turn and give the turn to the other group."""
    if not BY_ROW:
        mbarrier.wait(turns.index(GROUP), PHASE)
    product = hopper.warpgroup_mma(a, b, product, use_acc=never, is_async=True)
    if not BY_ROW:
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
    return product


@gluon.jit
def added(total, product, by_row, by_column, BY_ROW: gl.constexpr):
    """Compute total + product * scales, at this point of the program.

    The assembler would otherwise move the sum behind the next product, which needs 64 registers that are not free.
    Two things prevent that: the next product may read this one (`never`, below), and a volatile move of the sum.
    """
    if BY_ROW:
        total += product * by_row[:, None] * by_column[None, :]
    else:
        total += product * by_row[:, None]
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [total], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def write(out, total, m, n, buffer):
    """Write total [64, 128] to out[m:, n:] through shared memory; the copy engine omits elements outside out."""
    buffer.store(total.to(buffer.dtype))
    hopper.fence_async_shared()
    store_tile(out, [m, n], buffer)


@gluon.jit
def multiply(
    out,
    scale_b,
    stages,
    buffers,
    barriers,
    M,
    N,
    K,
    GROUP: gl.constexpr,
    BY_ROW: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Compute the rows [128 GROUP, 128 GROUP + 128) in every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    RIGHT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BELOW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    a_stages, b_stages, scale_a_stages, scale_b_stages = stages
    full, free, turns = barriers
    tiles_m, tiles_n, blocks = gl.cdiv(M, ROWS), gl.cdiv(N, BLOCK), gl.cdiv(K, BLOCK)
    never = M < 0  # always false, which the assembler cannot know; see `added`
    product = gl.zeros([HALF, BLOCK], gl.float32, LAYOUT)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, BAND)
        upper = gl.zeros([HALF, BLOCK], gl.float32, LAYOUT)
        lower = gl.zeros([HALF, BLOCK], gl.float32, LAYOUT)
        squares = scale_b + tile_n * blocks
        square = 1.0
        if not BY_ROW:
            square = gl.load(squares)
        for block in range(blocks):
            stage = wait_for_full_stage(full, step, STAGES)
            codes = a_stages.index(stage)
            b = b_stages.index(stage).permute((1, 0))
            rows = scale_a_stages.index(stage)
            first = rows.slice(GROUP * 2 * HALF, HALF).load(RIGHT) * square
            second = rows.slice(GROUP * 2 * HALF + HALF, HALF).load(RIGHT) * square
            product = start_product(
                codes.slice(GROUP * 2 * HALF, HALF),
                b,
                product,
                never,
                turns,
                GROUP,
                1 - GROUP,
                BY_ROW,
            )
            if not BY_ROW:
                square = gl.load(squares + min(block + 1, blocks - 1))
            product = hopper.warpgroup_mma_wait(0, deps=[product])
            by_column = first
            if BY_ROW:
                by_column = scale_b_stages.index(stage).load(BELOW)
            upper = added(upper, product, first, by_column, BY_ROW)
            product = start_product(
                codes.slice(GROUP * 2 * HALF + HALF, HALF),
                b,
                product,
                never,
                turns,
                GROUP,
                GROUP,
                BY_ROW,
            )
            product = hopper.warpgroup_mma_wait(0, deps=[product])
            if BY_ROW:
                by_column = scale_b_stages.index(stage).load(BELOW)
            mbarrier.arrive(free.index(stage), count=1)
            lower = added(lower, product, second, by_column, BY_ROW)
            step += 1
        m, n = tile_m * ROWS + GROUP * 2 * HALF, tile_n * BLOCK
        tma.store_wait(0)
        write(out, upper, m, n, buffers.index(GROUP * BUFFERS))
        if BUFFERS == 1:
            tma.store_wait(0)
        write(out, lower, m + HALF, n, buffers.index(GROUP * BUFFERS + BUFFERS - 1))
    tma.store_wait(0)


@gluon.jit
def product_kernel(
    a,
    b,
    scale_a,
    scale_b,
    out,
    M,
    N,
    K,
    BY_ROW: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Compute out; scale_a [ceil(K / 128), M]; scale_b [ceil(N / 128), ceil(K / 128)], BY_ROW [ceil(K / 128), N].

    Args:
        BUFFERS: Number of 64-row result buffers per warp group.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LINE: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    RESULT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK], out.dtype.element_ty)
    blocks = gl.cdiv(K, BLOCK)
    matrices = (
        tma.make_tensor_descriptor(a, [M, K], [K, 1], [ROWS, BLOCK], CODES),
        tma.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK, BLOCK], CODES),
    )
    rows = tma.make_tensor_descriptor(scale_a, [blocks * M], [1], [ROWS], LINE)
    scales = (rows, rows)
    if BY_ROW:
        scales = (rows, tma.make_tensor_descriptor(scale_b, [blocks * N], [1], [BLOCK], LINE))
    results = tma.make_tensor_descriptor(out, [M, N], [N, 1], [HALF, BLOCK], RESULT)
    stages = (
        gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, ROWS, BLOCK], CODES),
        gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, BLOCK, BLOCK], CODES),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES if BY_ROW else 1, BLOCK], LINE),
    )
    buffers = gl.allocate_shared_memory(out.dtype.element_ty, [2 * BUFFERS, HALF, BLOCK], RESULT)
    full, free = stage_barriers(STAGES)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    barriers = (full, free, turns)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    results,
                    scale_b,
                    stages,
                    buffers,
                    barriers,
                    M,
                    N,
                    K,
                    0,
                    BY_ROW,
                    STAGES,
                    BAND,
                    BUFFERS,
                ),
            ),
            (
                multiply,
                (
                    results,
                    scale_b,
                    stages,
                    buffers,
                    barriers,
                    M,
                    N,
                    K,
                    1,
                    BY_ROW,
                    STAGES,
                    BAND,
                    BUFFERS,
                ),
            ),
            (fetch, (matrices, scales, stages, barriers, M, N, K, BY_ROW, STAGES, BAND)),
        ],
        [4, 1],
        [240, 24],
    )


@functools.lru_cache(maxsize=4096)
def product(m: int, n: int, k: int, dtype: str, *, by_row: bool, processors: int) -> Launch:
    """Launch (a [m, k], b [n, k], scale_a [ceil(k/128), m], scale_b) -> out [m, n] in dtype.

    scale_b is [ceil(n/128), ceil(k/128)], or [ceil(k/128), n] with by_row. n and k are multiples of 16, m of 4: the
    copy engine requires scale rows that begin at multiples of 16 bytes.

    Args:
        by_row: b has one scale per row and 128 columns.
        processors: Number of multiprocessors on the GPU.
    """
    tiles = ceil_div(m, TILE_ROWS) * ceil_div(n, BLOCK.value)
    return Launch(
        product_kernel,
        (min(tiles, processors), 1, 1),
        (Output((m, n), dtype),),
        (m, n, k),
        (by_row, 3, 8, 1 if dtype == "float32" else 2),
        warps=4,
        registers=REGISTERS,
    )

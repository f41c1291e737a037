"""FP8 codes, in blocks of 128, for a result that the same kernel computes: f(x), dx, or dy with its column sums.

The result [M, N] is rounded to its dtype in registers, one 128 x 128 tile at a time, and quantized as in `block_cast`.
Codes and scales have the same bits as from separate operations, and the result itself is never stored. A tile's even
and odd rows are computed separately, so that pairs of codes cross the shared memory as one word (see `tile`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .activation import CURVES
from .activation_cast import activated, gradients, store_column_sums
from .block_cast import Blocks, tile_blocks, tile_square
from .conversion import NATIVE
from .launch import MEASURED_MEMORY, Launch, Machine, Output, codes_dtype

_WIDTH = 128
WIDTH = tl.constexpr(_WIDTH)


@triton.jit
def _emit(
    even,
    odd,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    K,
    first_m,
    first_k,
    half,
    k,
    SQUARE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    if SQUARE:
        tile_square(
            even,
            odd,
            codes,
            scale,
            codes_t,
            scale_t,
            M,
            K,
            first_m,
            first_k,
            half,
            k,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            PAIRS,
            EVEN,
            CONVERSION,
        )
    else:
        tile_blocks(
            even,
            odd,
            codes,
            scale,
            codes_t,
            scale_t,
            M,
            K,
            first_m,
            first_k,
            half,
            k,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            PAIRS,
            EVEN,
            CONVERSION,
        )


@triton.jit
def _forward_tile(
    program,
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    width,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, WIDTH)
    tile_m, tile_n = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(width, WIDTH), BAND)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_n = (tile_n * WIDTH).to(tl.int64)
    even = activated(
        x,
        M,
        width,
        x_stride,
        first_m,
        first_n,
        half * 2,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    odd = activated(
        x,
        M,
        width,
        x_stride,
        first_m,
        first_n,
        half * 2 + 1,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    _emit(
        even,
        odd,
        codes,
        scale,
        codes_t,
        scale_t,
        M,
        width,
        first_m,
        first_n,
        half,
        column,
        SQUARE,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        PAIRS,
        EVEN,
        CONVERSION,
    )


@triton.jit
def forward_kernel(
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    M,
    width,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize the tiles of y [M, width]; programs share full tiles, and load STAGES tiles ahead.

    Unless EVEN, one program per tile; see `block_cast.both_blocks_kernel`.
    """
    first = tl.program_id(0)
    if EVEN:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(width, WIDTH)
        for program in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                program,
                x,
                codes,
                scale,
                codes_t,
                scale_t,
                M,
                width,
                x_stride,
                limit,
                alpha,
                offset,
                CURVE,
                GATED,
                SQUARE,
                MAXIMUM,
                EPSILON,
                POWER_OF_TWO,
                VALUE_FOR_INF,
                BLOCK_M,
                BAND,
                PAIRS,
                EVEN,
                CONVERSION,
            )
    else:
        _forward_tile(
            first,
            x,
            codes,
            scale,
            codes_t,
            scale_t,
            M,
            width,
            x_stride,
            limit,
            alpha,
            offset,
            CURVE,
            GATED,
            SQUARE,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            BLOCK_M,
            BAND,
            PAIRS,
            EVEN,
            CONVERSION,
        )


@triton.jit
def _backward_tile(
    program,
    dy,
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    workspace,
    M,
    width,
    dy_stride,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, WIDTH)
    columns = 2 * width if GATED else width
    tile_m, tile_n = tile.position(program, tl.cdiv(M, BLOCK_M), tl.cdiv(width, WIDTH), BAND)
    first_m = (tile_m * BLOCK_M).to(tl.int64)
    first_n = (tile_n * WIDTH).to(tl.int64)
    even, even_b = gradients(
        dy,
        x,
        M,
        width,
        dy_stride,
        x_stride,
        first_m,
        first_n,
        half * 2,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    odd, odd_b = gradients(
        dy,
        x,
        M,
        width,
        dy_stride,
        x_stride,
        first_m,
        first_n,
        half * 2 + 1,
        column,
        limit,
        alpha,
        offset,
        CURVE,
        GATED,
        EVEN,
    )
    _emit(
        even,
        odd,
        codes,
        scale,
        codes_t,
        scale_t,
        M,
        columns,
        first_m,
        first_n,
        half,
        column,
        SQUARE,
        MAXIMUM,
        EPSILON,
        POWER_OF_TWO,
        VALUE_FOR_INF,
        PAIRS,
        EVEN,
        CONVERSION,
    )
    if workspace is not None:
        sums = even.to(tl.float32) + odd.to(tl.float32)
        store_column_sums(workspace, sums, tile_m, columns, first_n, column, width)
    if GATED:
        _emit(
            even_b,
            odd_b,
            codes,
            scale,
            codes_t,
            scale_t,
            M,
            columns,
            first_m,
            first_n + width,
            half,
            column,
            SQUARE,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            PAIRS,
            EVEN,
            CONVERSION,
        )
        if workspace is not None:
            sums = even_b.to(tl.float32) + odd_b.to(tl.float32)
            store_column_sums(workspace + width, sums, tile_m, columns, first_n, column, width)


@triton.jit
def backward_kernel(
    dy,
    x,
    codes,
    scale,
    codes_t,
    scale_t,
    workspace,
    M,
    width,
    dy_stride,
    x_stride,
    limit,
    alpha,
    offset,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    SQUARE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    VALUE_FOR_INF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    CONVERSION: tl.constexpr,
):
    """Quantize the tiles of dx [M, width], and if gated the same tiles in the second half of [M, 2 * width].

    "identity": dx = dy. workspace [row tiles, columns] receives the sums over a tile's rows. Unless EVEN, one program
    per tile; see `block_cast.both_blocks_kernel`.
    """
    first = tl.program_id(0)
    if EVEN:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(width, WIDTH)
        for program in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
            _backward_tile(
                program,
                dy,
                x,
                codes,
                scale,
                codes_t,
                scale_t,
                workspace,
                M,
                width,
                dy_stride,
                x_stride,
                limit,
                alpha,
                offset,
                CURVE,
                GATED,
                SQUARE,
                MAXIMUM,
                EPSILON,
                POWER_OF_TWO,
                VALUE_FOR_INF,
                BLOCK_M,
                BAND,
                PAIRS,
                EVEN,
                CONVERSION,
            )
    else:
        _backward_tile(
            first,
            dy,
            x,
            codes,
            scale,
            codes_t,
            scale_t,
            workspace,
            M,
            width,
            dy_stride,
            x_stride,
            limit,
            alpha,
            offset,
            CURVE,
            GATED,
            SQUARE,
            MAXIMUM,
            EPSILON,
            POWER_OF_TWO,
            VALUE_FOR_INF,
            BLOCK_M,
            BAND,
            PAIRS,
            EVEN,
            CONVERSION,
        )


class FusedPlan(NamedTuple):
    """Launch settings for a kernel.

    Attributes:
        warps: Warps per program.
        resident: Programs per multiprocessor that share the tiles; 0: one program per tile.
        stages: Tiles whose loads are in flight at once; only whole tiles can be loaded ahead.
        band: Tile rows that are visited together.
    """

    warps: int
    resident: int
    stages: int
    band: int = 4


def forward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    constants: tuple[float, float, float],
    blocks: Blocks,
    machine: Machine,
    plan: FusedPlan | None = None,
) -> Launch:
    """Launch (x [M, width] or [M, 2 * width]) -> codes, scale, codes_t, scale_t of f(x) [M, width]."""
    plan = plan or _plan(name, blocks, shape, machine)
    tiling, grid = _tiling(shape, blocks, machine, plan)
    scalars = (*shape, x_stride, *constants)
    fixed = (CURVES[name], gated, blocks.square, *blocks.steps, *tiling, NATIVE)
    return Launch(forward_kernel, grid, _outputs(shape, blocks), scalars, fixed, plan.warps)


def backward(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    constants: tuple[float, float, float],
    blocks: Blocks,
    sums_columns: bool,
    machine: Machine,
    plan: FusedPlan | None = None,
) -> Launch:
    """Launch (dy [M, width], x) -> codes, scale, codes_t, scale_t of dx [M, N], column sums.

    The float32 column sums [row tiles, N] are present if requested. N is 2 * width if gated, where width must be a
    multiple of 128. "identity": x is None, dx is dy. `strides` belong to dy and x.
    """
    rows, width = shape
    assert not gated or width % _WIDTH == 0, (
        "a block would reach from the gate's gradient into the other"
    )
    plan = plan or _plan(name, blocks, shape, machine)
    tiling, grid = _tiling(shape, blocks, machine, plan)
    columns = 2 * width if gated else width
    sums = Output((ceil_div(rows, tiling[0]), columns), "float32") if sums_columns else None
    outputs = (*_outputs((rows, columns), blocks), sums)
    curve = "identity" if name == "identity" else CURVES[name]
    fixed = (curve, gated, blocks.square, *blocks.steps, *tiling, NATIVE)
    return Launch(backward_kernel, grid, outputs, (*shape, *strides, *constants), fixed, plan.warps)


def _outputs(shape: tuple[int, int], blocks: Blocks) -> tuple[Output | None, ...]:
    rows, depth = shape
    dtype = codes_dtype(blocks.element)
    tiles_m, tiles_k = ceil_div(rows, _WIDTH), ceil_div(depth, _WIDTH)
    by_rows = Output((rows, depth), dtype)
    by_columns = Output((depth, rows), dtype) if blocks.columnwise else None
    if blocks.square:
        scale_t = Output((tiles_k, tiles_m), "float32") if blocks.columnwise else None
        return by_rows, Output((tiles_m, tiles_k), "float32"), by_columns, scale_t
    scale_t = Output((tiles_m, depth), "float32", transposed=True) if blocks.columnwise else None
    return by_rows, Output((tiles_k, rows), "float32", transposed=True), by_columns, scale_t


def _tiling(
    shape: tuple[int, int], blocks: Blocks, machine: Machine, plan: FusedPlan
) -> tuple[tuple[int, int, int, bool, bool], tuple[int, int, int]]:
    """Tiling (tile rows, band, stages, whether M is even, whether tiles are complete) and the grid."""
    rows, width = shape
    block_m, even = _tile_rows(blocks), _has_whole_tiles(shape, blocks)
    tiles = ceil_div(rows, block_m) * ceil_div(width, _WIDTH)
    programs = min(plan.resident * machine.processors, tiles) if plan.resident and even else tiles
    stages = machine.stages(block_m * _WIDTH, plan.stages) if even else 1
    return (block_m, plan.band, stages, rows % 2 == 0, even), (programs, 1, 1)


def _tile_rows(blocks: Blocks) -> int:
    return _WIDTH if blocks.columnwise or blocks.square else 32


def _has_whole_tiles(shape: tuple[int, int], blocks: Blocks) -> bool:
    return shape[0] % _tile_rows(blocks) == 0 and shape[1] % _WIDTH == 0


# H200, 8192 x 14336 bfloat16, both directions, ms; few programs share the tiles and load the next ones ahead. f(x),
# SwiGLU and GELU: this plan 0.266 and 0.250, with two stages 0.331 and 0.333, with 16 warps 0.342 and 0.330 (with 128
# registers, fewer than a tile needs), one program per tile 0.395 and 0.340, two 4-warp programs 0.428 and 0.263;
# separate steps 0.301 and 0.255. dx with its column sums: 0.676 and 0.367, with 16 warps 0.960 and 0.510, with 4 warps
# 1.253 and 0.620; separate steps 0.696 and 0.392.
_BOTH = FusedPlan(8, 1, 3)
# dy itself with its column sums: 0.160, with 8 warps 0.237, with two stages 0.190; separate steps 0.225. Less shared
# memory than an H200's has room for one program, whose 4 warps need 360 bytes of stack on 12.0, and 8 need none.
_IDENTITY = FusedPlan(4, 2, 3)
# 32-row tiles, several programs per processor. f(x) for SwiGLU and GELU: 0.190 and 0.168; separate 0.252, 0.204.
_ROWS = FusedPlan(8, 0, 1)


# Predicated tiles, one program per tile. 4 warps need up to 1 KB of stack per thread. With Triton 3.9, 8 warps of
# activations in 1 x 128 blocks need up to 104 bytes on 8.6 and 12.1, where 16 need none; on 9.0 to 11.0 they need up to
# 16, and 16 warps 48. The identity needs up to 80 with 8 warps, and 152 with 16. Squares need 48 bytes with 8.
_PREDICATED = FusedPlan(8, 0, 1)
_PREDICATED_16 = FusedPlan(16, 0, 1)


def _plan(name: str, blocks: Blocks, shape: tuple[int, int], machine: Machine) -> FusedPlan:
    if not (blocks.columnwise or blocks.square):
        return _ROWS
    large = machine.shared_memory >= MEASURED_MEMORY
    if not _has_whole_tiles(shape, blocks):
        wide = blocks.square or (name != "identity" and not large)
        return _PREDICATED_16 if wide else _PREDICATED
    return _IDENTITY if name == "identity" and machine.fits_measured_plans else _BOTH

"""out [M, N] = a [M, K] @ b [N, K].T of FP8 codes with float32 scales for 1x128 or 128x128 elements, of any value.

Each partial sum over 128 products is promoted to float32, on every GPU with FP8 tensor cores. Elsewhere codes are
decoded to bfloat16 in the kernel.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from . import tile
from .conversion import INTEGERS
from .launch import Launch
from .product_parts import NO_EPILOGUE, ProductEpilogue, Side, choose_tile, finish, is_swapped
from .rounding import to_values

_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@triton.jit
def block_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    x,
    out,
    kept,
    M,
    ROW_A,
    COLUMN_A,
    N,
    ROW_B,
    COLUMN_B,
    K,
    LEADING_A,
    LEADING_B,
    ROW_STRIDE,
    COLUMN_STRIDE,
    EVEN: tl.constexpr,
    UNIT_A: tl.constexpr,
    UNIT_B: tl.constexpr,
    DECODE_A: tl.constexpr,
    DECODE_B: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BAND: tl.constexpr,
):
    """Compute out [M, N] from FP8 codes with a float32 scale for UNIT_A (1 or 128) rows of a and BLOCK_K = 128 columns.

    Args:
        scale_a: Element (row // UNIT_A, column // 128) at row // UNIT_A * ROW_A + column // 128 * COLUMN_A.
        DECODE_A: "" to multiply codes, or the byte conversion by integers, to multiply their values in bfloat16.
    """
    tile_m, tile_n = tile.position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), BAND)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end are clamped rather than masked: their results are not stored.
    read_m, read_n = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    a_tile = a + (read_m.to(tl.int64)[:, None] * LEADING_A + k[None, :])
    b_tile = b + (read_n.to(tl.int64)[:, None] * LEADING_B + k[None, :])
    # A tile's rows share one scale for 128 rows, because a tile has at most 128 rows and they are aligned.
    if UNIT_A == 1:
        scale_a += read_m.to(tl.int64) * ROW_A
    else:
        scale_a += (tile_m * BLOCK_M // UNIT_A).to(tl.int64) * ROW_A
    if UNIT_B == 1:
        scale_b += read_n.to(tl.int64) * ROW_B
    else:
        scale_b += (tile_n * BLOCK_N // UNIT_B).to(tl.int64) * ROW_B
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        if EVEN:
            a_codes = tl.load(a_tile)
            b_codes = tl.load(b_tile)
        else:
            inside = (k < K - block * BLOCK_K)[None, :]
            a_codes = tl.load(a_tile, mask=inside, other=0.0)
            b_codes = tl.load(b_tile, mask=inside, other=0.0)
        if DECODE_A != "":
            a_values = to_values(a_codes, DECODE_A).to(tl.bfloat16)
            product = tl.dot(a_values, to_values(b_codes, DECODE_B).to(tl.bfloat16).T)
        else:
            product = tl.dot(a_codes, b_codes.T)
        by_a = tl.load(scale_a + block * COLUMN_A)
        by_b = tl.load(scale_b + block * COLUMN_B)
        if UNIT_A == 1 and UNIT_B == 1:
            total += product * by_a[:, None] * by_b[None, :]
        elif UNIT_A == 1:
            total += product * (by_a * by_b)[:, None]
        elif UNIT_B == 1:
            total += product * (by_a * by_b)[None, :]
        else:
            total += product * (by_a * by_b)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    finish(
        total,
        bias,
        x,
        out,
        kept,
        m,
        n,
        M,
        N,
        ROW_STRIDE,
        COLUMN_STRIDE,
        ALONG_ROWS,
        ACCUMULATE,
        ACTIVATION,
    )


@functools.lru_cache(maxsize=4096)
def block_product(
    a: Side,
    b: Side,
    depth: int,
    out: int,
    dtype: str | None = None,
    *,
    epilogue: ProductEpilogue = NO_EPILOGUE,
    decodes: bool = False,
    swaps: bool = True,
) -> Launch:
    """Launch (left, right, their float32 scales, bias | None, x | None) -> out, kept; see `product`.

    Args:
        decodes: Multiply the codes' values in bfloat16, for GPUs without FP8 products.
        swaps: A result with few rows is computed as its transpose, with another tile.
    """
    swapped = swaps and is_swapped(a.rows, b.rows)
    left, right = (b, a) if swapped else (a, b)
    strides = (1, out) if swapped else (out, 1)
    rows, columns, stages, warps = (
        _tile_of_bytes(right.rows) if decodes else choose_tile(right.rows)
    )
    elements = [INTEGERS[_DTYPES[side.element]] if decodes else "" for side in (left, right)]
    constants = (
        depth % 128 == 0,
        left.unit,
        right.unit,
        *elements,
        stages,
        rows,
        columns,
        128,
        swapped,
        epilogue.accumulates,
        epilogue.activation,
        8,
    )
    return Launch(
        block_kernel,
        (ceil_div(left.rows, rows) * ceil_div(right.rows, columns), 1, 1),
        epilogue.outputs((a.rows, b.rows), dtype),
        (
            left.rows,
            *left.strides,
            right.rows,
            *right.strides,
            depth,
            left.leading,
            right.leading,
            *strides,
        ),
        constants,
        warps,
        in_place=(6,) if epilogue.accumulates else (),
    )


def _tile_of_bytes(columns: int) -> tuple[int, int, int, int]:
    """Choose `_tile` for a product that decodes bytes."""
    return 128, min(64, max(16, triton.next_power_of_2(columns))), 3, 8

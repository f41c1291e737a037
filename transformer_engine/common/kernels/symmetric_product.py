"""out [L, M, M] = alpha a [L, M, K] @ b [L, M, K].T + beta c, for products that are symmetric matrices.

Only the tiles on and below the diagonal are multiplied; each is also stored transposed. This takes half the work of a
general product.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output

_TILE, _DEPTH, _STAGES, _WARPS = 128, 64, 4, 8


@triton.jit
def symmetric_product_kernel(
    a,
    b,
    c,
    out,
    rows,
    depth,
    alpha,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute one tile and its mirror image; EVEN: the sizes are multiples of the tile's."""
    number = tl.program_id(0)
    # The row of tiles whose first number is at most `number`: i (i + 1) / 2 <= number < (i + 1) (i + 2) / 2.
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    m = i * TILE + tl.arange(0, TILE)
    n = j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    a_tile = a + matrix * rows * depth + m.to(tl.int64)[:, None] * depth + k[None, :]
    b_tile = b + matrix * rows * depth + n.to(tl.int64)[:, None] * depth + k[None, :]
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for block in tl.range(0, tl.cdiv(depth, DEPTH), num_stages=STAGES):
        if EVEN:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            inside = (k < depth - block * DEPTH)[None, :]
            a_values = tl.load(a_tile, mask=inside & (m < rows)[:, None], other=0.0)
            b_values = tl.load(b_tile, mask=inside & (n < rows)[:, None], other=0.0)
        total = tl.dot(a_values, b_values.T, total)
        a_tile += DEPTH
        b_tile += DEPTH
    total = total * alpha
    within = (m < rows)[:, None] & (n < rows)[None, :]
    place = matrix * rows * rows + m.to(tl.int64)[:, None] * rows + n[None, :]
    if c is not None:
        total += tl.load(c + place, mask=within, other=0.0).to(tl.float32) * beta
    if (
        i == j
    ):  # both halves of this tile are sums of other roundings; iterations amplify a difference
        total = tl.where(m[:, None] >= n[None, :], total, total.T)
    result = total.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=within)
    if i != j:
        mirror = matrix * rows * rows + n.to(tl.int64)[:, None] * rows + m[None, :]
        tl.store(out + mirror, result.T, mask=(n < rows)[:, None] & (m < rows)[None, :])


@functools.cache
def symmetric_product(
    matrices: int, rows: int, depth: int, dtype: str, alpha: float, beta: float
) -> Launch:
    """Launch (a [L, M, K], b [L, M, K], c [L, M, M] or None) -> out [L, M, M]; all contiguous.

    Args:
        matrices: L.
        rows: M.
        depth: K.
        dtype: Result dtype.
        alpha: Factor for the product.
        beta: Factor for c.
    """
    tiles = ceil_div(rows, _TILE)
    return Launch(
        symmetric_product_kernel,
        (tiles * (tiles + 1) // 2, matrices, 1),
        (Output((matrices, rows, rows), dtype),),
        (rows, depth, alpha, beta),
        (_TILE, _DEPTH, _STAGES, rows % _TILE == 0 and depth % _DEPTH == 0),
        warps=_WARPS,
    )

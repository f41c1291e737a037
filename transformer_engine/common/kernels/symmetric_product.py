"""out [L, M, M] = alpha a [L, M, K] @ b [L, M, K].T + beta c, for products that are symmetric matrices.

Only the tiles on and below the diagonal are multiplied; each is also stored transposed. This takes half the work of a
general product.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import MEASURED_MEMORY, Launch, Machine, Output

_ROWS, _DEPTH, _STAGES, _WARPS = 128, 64, 4, 8
MOST_PAIRS = tl.constexpr(
    16384
)  # pairs of rows of tiles: 4 million rows, whose products exceed every memory


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
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute one tile [ROWS, 2 ROWS] on or below the diagonal; EVEN: the sizes are multiples of the tile's."""
    number = tl.program_id(0)
    # Both rows of tiles in pair p have p + 1 tiles: p (p + 1) tiles precede them. The limits of pair and j change no
    # value; they bound the offsets.
    pair = ((tl.sqrt(4.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    pair = tl.minimum(tl.maximum(pair, 0), MOST_PAIRS)
    pair = tl.where(pair * (pair + 1) > number, pair - 1, pair)
    pair = tl.where((pair + 1) * (pair + 2) <= number, pair + 1, pair)
    rest = number - pair * (pair + 1)
    second = (rest > pair).to(tl.int32)
    i = 2 * pair + second
    j = tl.minimum(tl.maximum(rest - second * (pair + 1), 0), pair)
    matrix = tl.program_id(1).to(tl.int64)
    m = i * ROWS + tl.arange(0, ROWS)
    n = j * (2 * ROWS) + tl.arange(0, 2 * ROWS)
    k = tl.arange(0, DEPTH)
    a_tile = a + matrix * rows * depth + m.to(tl.int64)[:, None] * depth + k[None, :]
    b_tile = b + matrix * rows * depth + n.to(tl.int64)[:, None] * depth + k[None, :]
    total = tl.zeros((ROWS, 2 * ROWS), dtype=tl.float32)
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
    # Elements above the diagonal are those of other tiles, or of this one: results are symmetric to the bit, since
    # iterations would amplify a difference.
    lower = (m < rows)[:, None] & (n[None, :] <= m[:, None])
    place = matrix * rows * rows + m.to(tl.int64)[:, None] * rows + n[None, :]
    if c is not None:
        total += tl.load(c + place, mask=lower, other=0.0).to(tl.float32) * beta
    result = total.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=lower)
    mirror = matrix * rows * rows + n.to(tl.int64)[:, None] * rows + m[None, :]
    tl.store(out + mirror, result.T, mask=(m < rows)[None, :] & (n[:, None] < m[None, :]))


@functools.cache
def symmetric_product(
    matrices: int,
    rows: int,
    depth: int,
    dtype: str,
    factors: tuple[float, float],
    shared_memory: int = MEASURED_MEMORY,
) -> Launch:
    """Launch (a [L, M, K], b [L, M, K], c [L, M, M] or None) -> out [L, M, M]; all contiguous.

    Args:
        matrices: L.
        rows: M.
        depth: K.
        dtype: Result dtype.
        factors: Factors alpha for the product and beta for c.
        shared_memory: Bytes per program.
    """
    pairs = ceil_div(rows, 2 * _ROWS)
    # The last pair has no second row of tiles if the rows end in its first.
    tiles = pairs * (pairs + 1) - (pairs if rows % (2 * _ROWS) in range(1, _ROWS + 1) else 0)
    stages = Machine(0, shared_memory, 2).stages(3 * _ROWS * _DEPTH, _STAGES)
    return Launch(
        symmetric_product_kernel,
        (tiles, matrices, 1),
        (Output((matrices, rows, rows), dtype),),
        (rows, depth, *factors),
        (_ROWS, _DEPTH, stages, rows % (2 * _ROWS) == 0 and depth % _DEPTH == 0),
        warps=_WARPS,
    )

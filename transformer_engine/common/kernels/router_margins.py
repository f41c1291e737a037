"""histogram[e, bin] += 1 for each token: the bin is the score of expert e minus the largest score not chosen.

Counts are integers, so that the order in which programs add does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch
from .router import LOWEST, rank_value, ranks, tokens_of_program

NONE = tl.constexpr(1 << 30)  # above every expert index


@triton.jit
def margins_kernel(
    logits,
    bias,
    histogram,
    bounds,
    tokens,
    experts,
    bins,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Add 1 to histogram[e, bin] for every token; the distance from e's score to the largest not chosen gives bin."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)[None, :] + tl.zeros([ROWS, EXPERTS], tl.int32)
    inside = (token < tokens)[:, None] & (expert < experts)
    x = tl.load(logits + token.to(tl.int64)[:, None] * experts + expert, mask=inside, other=0.0).to(
        tl.float32
    )
    score = 1.0 / (1.0 + tl.exp(-x))
    key = score + tl.load(bias + expert, mask=inside, other=0.0)
    rank = tl.where(inside, ranks(key), LOWEST)
    for _ in range(K):
        best = tl.max(rank, 1)[:, None]
        first = tl.min(tl.where(rank == best, expert, NONE), 1)[:, None]
        rank = tl.where(expert == first, LOWEST, rank)
    cutoff = rank_value(tl.max(rank, 1))[:, None]
    lower = tl.load(bounds)
    bin_index = tl.floor(
        (cutoff - score - lower) * bins.to(tl.float32) / (tl.load(bounds + 1) - lower)
    )
    # NaN falls into the first bin, like values below it.
    bin_index = tl.where(bin_index > 0.0, tl.minimum(bin_index, (bins - 1).to(tl.float32)), 0.0)
    target = histogram + expert.to(tl.int64) * bins + bin_index.to(tl.int32)
    tl.atomic_add(target, tl.full([ROWS, EXPERTS], 1, tl.int32), mask=inside, sem="relaxed")


def margins(tokens: int, experts: int, k: int, bins: int) -> Launch:
    """Launch (logits [T, E], bias [E], histogram int32 [E, bins], bounds [2]) that adds to the histogram."""
    width = triton.next_power_of_2(experts)
    rows, warps = tokens_of_program(width)
    grid = (ceil_div(tokens, rows), 1, 1)
    scalars = (tokens, experts, bins)
    return Launch(margins_kernel, grid, (), scalars, (k, rows, width), warps, in_place=(2,))

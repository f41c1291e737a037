"""probs [T, E] = weights for each token's k experts, their gradient, and loss = c * sum(tokens[e] * probs[t, e]).

Computed in float32 from logits x: scores s = softmax(x), x itself (softmax after the choice), sigmoid(x) or
sqrt(softplus(x)). The k largest s + bias are chosen. With groups, only the best groups' experts are candidates; groups
are ranked by the sum of their largest scores. Ties go to the lower index; NaN is greater than infinity, as in torch.
Expert rows are tiles [groups, experts per group].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .launch import Launch, Output
from .program import Program, step

EPSILON = tl.constexpr(1e-20)
SOFTMAX, SOFTMAX_AFTER, SIGMOID, SQRTSOFTPLUS = range(4)
SCORES = {
    "softmax": SOFTMAX,
    "softmax_after": SOFTMAX_AFTER,
    "sigmoid": SIGMOID,
    "sqrtsoftplus": SQRTSOFTPLUS,
}
BYTES, BITS, INDICES = range(3)
MAPS = {"bytes": BYTES, "bits": BITS, "indices": INDICES}

_SOFTMAX = tl.constexpr(SOFTMAX)
_AFTER = tl.constexpr(SOFTMAX_AFTER)
_SIGMOID = tl.constexpr(SIGMOID)
_SQRTSOFTPLUS = tl.constexpr(SQRTSOFTPLUS)
_BYTES = tl.constexpr(BYTES)
_BITS = tl.constexpr(BITS)
_NONE = tl.constexpr(1 << 30)  # above every expert index
LOWEST = tl.constexpr(-(1 << 31))  # below every rank
_LINEAR = tl.constexpr(20.0)  # above this, softplus(x) = x in float32


@triton.jit
def ranks(x):
    """Compute int32 ranks in torch's sort order: NaN above infinity, and -0 equal to 0.

    Triton's floating-point maxima drop NaN.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def rank_value(rank):
    """Convert a rank to its number."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_experts(x):
    """Sum over the experts [rows, groups, experts], keeping the axes."""
    return tl.expand_dims(tl.expand_dims(tl.sum(tl.sum(x, 2), 1), 1), 2)


@triton.jit
def _greatest(x):
    return tl.expand_dims(tl.expand_dims(tl.max(tl.max(x, 2), 1), 1), 2)


@triton.jit
def _softmax(x):
    weight = tl.exp(x - _greatest(x))
    return weight / _sum_experts(weight)


@triton.jit
def _softplus(x):
    """Compute log(1 + e^x), with Kahan's quotient for the part of e^x that 1 + e^x rounds off."""
    power = tl.exp(tl.where(x > _LINEAR, _LINEAR, x))  # NaN stays NaN
    above = 1.0 + power
    exact = tl.where(
        above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0))
    )
    return tl.where(x > _LINEAR, x, exact)


@triton.jit
def _score(x, inside, KIND: tl.constexpr):
    """Compute scores from logits, 0 outside."""
    score = x
    if KIND == _SOFTMAX:
        score = _softmax(tl.where(inside, x, float("-inf")))
    if KIND == _SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    if KIND == _SQRTSOFTPLUS:
        score = tl.sqrt(_softplus(x))
    return tl.where(inside, score, 0.0)


@triton.jit
def _best_groups(rank, group, groups, PLACES: tl.constexpr, KEPT: tl.constexpr):
    """Select groups, bool [rows, groups]: the KEPT groups whose PLACES largest keys have the largest sum.

    `rank` is [rows, groups, experts].
    """
    expert = tl.arange(0, rank.shape[2])[None, None, :] + tl.zeros_like(rank)
    total = tl.zeros([rank.shape[0], rank.shape[1]], tl.float32)
    for _ in range(PLACES):
        best = tl.max(rank, 2)
        total += rank_value(best)
        first = tl.min(tl.where(rank == best[:, :, None], expert, _NONE), 2)
        rank = tl.where(expert == first[:, :, None], LOWEST, rank)
    of_group = tl.where(group < groups, ranks(total), LOWEST)
    selected = group < 0
    for _ in range(KEPT):
        best = tl.max(of_group, 1)
        first = tl.min(tl.where(of_group == best[:, None], group, _NONE), 1)
        chosen = group == first[:, None]
        selected = selected | chosen
        of_group = tl.where(chosen, LOWEST, of_group)
    return selected


@triton.jit
def choose_kernel(
    logits,
    bias,
    indices,
    probs,
    map,
    scores,
    tokens,
    experts,
    groups,
    places,
    scale,
    K: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP_PLACES: tl.constexpr,
    KEPT: tl.constexpr,
    MAP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute probs, the map of chosen experts, and the scores for the gradient.

    Args:
        WHOLE: Return probs for all experts, which sum to 1, for a loss; otherwise for the chosen experts.
        KEPT: Number of groups with candidates, by the sum of their GROUP_PLACES largest scores; 0: all groups.
        WIDTH: Bytes in a bit map, padded.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)[None, :]
    slot = tl.arange(0, PLACES)[None, None, :]
    valid = (token < tokens)[:, None, None]
    inside = (group < groups)[:, :, None] & (slot < places) & valid
    expert = group[:, :, None] * places + slot + tl.zeros([ROWS, GROUPS, PLACES], tl.int32)
    row = token.to(tl.int64)[:, None, None] * experts
    x = tl.load(logits + row + expert, mask=inside, other=0.0).to(tl.float32)
    score = _score(x, inside, KIND)
    key = score
    if bias is not None:
        key += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    rank = tl.where(inside, ranks(key), LOWEST)
    if KEPT > 0:
        numbers = group + tl.zeros([ROWS, GROUPS], tl.int32)
        selected = _best_groups(rank, numbers, groups, GROUP_PLACES, KEPT)
        rank = tl.where(inside, ranks(tl.where(selected[:, :, None], key, float("-inf"))), LOWEST)
    chosen = expert < 0
    lane = tl.arange(0, WIDTH)[None, :]
    bits = tl.zeros([ROWS, WIDTH], tl.int32)
    for i in range(K):
        best = _greatest(rank)
        first = tl.min(tl.min(tl.where((rank == best) & inside, expert, experts), 2), 1)
        picked = (expert == first[:, None, None]) & inside
        chosen = chosen | picked
        rank = tl.where(picked, LOWEST, rank)
        bits |= tl.where(lane == (first // 8)[:, None], (1 << (first % 8))[:, None], 0)
        if indices is not None:
            target = indices + token.to(tl.int64) * K + i
            tl.store(target, first.to(indices.dtype.element_ty), mask=token < tokens)
    if map is not None:
        if MAP == _BITS:
            width = (experts + 7) // 8
            target = map + token.to(tl.int64)[:, None] * width + lane
            tl.store(target, bits.to(tl.uint8), mask=(token < tokens)[:, None] & (lane < width))
        else:
            tl.store(map + row + expert, chosen.to(tl.uint8), mask=inside)
    saved = score
    if WHOLE:
        weight = score
        if KIND != _SOFTMAX:
            weight = score / (_sum_experts(score) + EPSILON)
    else:
        if KIND == _AFTER:
            weight = _softmax(tl.where(chosen, x, float("-inf")))
            saved = tl.where(chosen, weight, float("-inf"))
        elif KIND == _SOFTMAX or K == 1:
            weight = tl.where(chosen, score, 0.0)
        else:
            weight = tl.where(chosen, score, 0.0)
            weight = weight / (_sum_experts(weight) + EPSILON)
        weight *= scale
    if KIND == _SQRTSOFTPLUS:
        saved = x
    tl.store(probs + row + expert, weight.to(probs.dtype.element_ty), mask=inside)
    if scores is not None:
        tl.store(scores + row + expert, saved, mask=inside)


@triton.jit
def gradient_kernel(
    map,
    scores,
    grad_probs,
    grad_logits,
    tokens,
    experts,
    scale,
    K: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    MAP: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Compute the gradient of the logits from the scores that choose_kernel saved."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < tokens)[:, None] & (expert < experts)
    row = token.to(tl.int64)[:, None]
    offset = row * experts + expert
    saved = tl.load(scores + offset, mask=inside, other=0.0)
    gradient = tl.load(grad_probs + offset, mask=inside, other=0.0).to(tl.float32)
    counts = inside
    if not WHOLE:
        gradient *= scale
        if MAP == _BYTES:
            counts = tl.load(map + offset, mask=inside, other=0) != 0
        elif MAP == _BITS:
            byte = tl.load(map + row * ((experts + 7) // 8) + expert // 8, mask=inside, other=0)
            counts = ((byte.to(tl.int32) >> (expert % 8)) & 1) != 0
        else:
            counts = expert + tl.zeros_like(saved).to(tl.int32) < 0
            for i in range(K):
                index = tl.load(map + token.to(tl.int64) * K + i, mask=token < tokens, other=-1)
                counts = counts | (expert == index.to(tl.int32)[:, None])
    gradient = tl.where(counts, gradient, 0.0)
    if KIND <= _AFTER:  # a softmax
        active = saved
        if KIND == _AFTER:
            active = tl.where(counts, saved, 0.0)
        result = active * (gradient - tl.sum(gradient * active, 1)[:, None])
    else:
        active = saved
        if KIND == _SQRTSOFTPLUS:
            active = tl.sqrt(_softplus(saved))
        share = tl.where(counts, active, 0.0)
        if WHOLE or K > 1:
            total = tl.sum(share, 1)[:, None] + EPSILON
            # Divided twice, because the square of a small total is 0 in float32.
            gradient = gradient / total - tl.sum(gradient * share, 1)[:, None] / total / total
        if KIND == _SIGMOID:
            slope = active * (1.0 - active)
        else:
            slope = tl.where(saved > _LINEAR, 1.0, 1.0 / (1.0 + tl.exp(-saved))) / (
                2.0 * active + EPSILON
            )
        result = tl.where(counts, gradient * slope, 0.0)
    tl.store(grad_logits + offset, result.to(grad_logits.dtype.element_ty), mask=inside)


@triton.jit
def loss_part_kernel(
    probs, tokens_of, parts, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute parts [programs] = sum of tokens_of[c] * probs[r, c] over a program's share of the rows."""
    first = tl.program_id(0) * share
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        number = tl.load(tokens_of + column, mask=column < columns, other=0).to(tl.float32)
        sums = tl.zeros([COLUMNS], tl.float32)
        for start in range(first, tl.minimum(first + share, rows), ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < tl.minimum(first + share, rows))[:, None] & (column < columns)[None, :]
            offsets = row.to(tl.int64)[:, None] * columns + column[None, :]
            sums += tl.sum(tl.load(probs + offsets, mask=inside, other=0.0).to(tl.float32), 0)
        total += sums * number
    tl.store(parts + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def loss_kernel(parts, total, loss, count, factor, BLOCK: tl.constexpr):
    """Compute loss [1] = factor / total^2 * sum(parts); total is the number of tokens, None if factor includes it."""
    lane = tl.arange(0, BLOCK)
    value = tl.sum(tl.load(parts + lane, mask=lane < count, other=0.0), 0) * factor
    if total is not None:
        tokens = tl.load(total).to(tl.float32)
        value = value / tokens / tokens
    tl.store(loss, value.to(loss.dtype.element_ty))


def choose(
    tokens: int,
    experts: int,
    k: int,
    kind: int,
    whole: bool,
    groups: tuple[int, int] | None,
    scale: float,
    map: int,
    probs: str,
    keeps: bool,
) -> Launch:
    """Launch (logits [T, E], bias [E] | None, indices [T, k] | None) -> probs, map, scores.

    Args:
        kind: A number from SCORES.
        groups: (number of groups, number of groups with candidates); None: all experts are candidates.
        map: A number from MAPS: uint8 [T, E], uint8 [T, ceil(E / 8)], or none if indices are written.
        keeps: Save float32 [T, E] for the gradient: the scores; for a softmax after the choice, its result (-inf for
            others); for sqrt(softplus), the logits.
    """
    count, top_groups = groups or (1, 0)
    places = experts // count
    tile = (triton.next_power_of_2(count), triton.next_power_of_2(places))
    width = ceil_div(experts, 8)
    shapes = {BYTES: (tokens, experts), BITS: (tokens, width)}
    outputs = (
        Output((tokens, experts), probs),
        Output(shapes[map], "uint8") if map in shapes else None,
        Output((tokens, experts), "float32") if keeps else None,
    )
    rows, warps = tokens_of_program(tile[0] * tile[1])
    # Without a bit map, one lane suffices.
    lanes = triton.next_power_of_2(width) if map == BITS else 1
    constants = (
        k,
        kind,
        whole,
        k // top_groups if top_groups else 0,
        top_groups,
        map,
        rows,
        *tile,
        lanes,
    )
    scalars = (tokens, experts, count, places, float(scale))
    grid = (ceil_div(tokens, rows), 1, 1)
    in_place = (2,) if map == INDICES else ()
    return Launch(choose_kernel, grid, outputs, scalars, constants, warps, in_place=in_place)


def gradient(
    tokens: int, experts: int, k: int, kind: int, whole: bool, scale: float, map: int, dtype: str
) -> Launch:
    """Launch (map | indices, scores, grad_probs) -> grad_logits [T, E] of choose; whole: no map is read."""
    width = triton.next_power_of_2(experts)
    rows, warps = tokens_of_program(width)
    outputs = (Output((tokens, experts), dtype),)
    constants = (k, kind, whole, map, rows, width)
    grid = (ceil_div(tokens, rows), 1, 1)
    return Launch(gradient_kernel, grid, outputs, (tokens, experts, float(scale)), constants, warps)


def loss(rows: int, columns: int, factor: float, dtype: str) -> Program:
    """Program (probs [rows, columns], tokens [columns], total [1] | None) -> loss [1]."""
    block = min(triton.next_power_of_2(columns), 1024)
    tile = max(4096 // block, 1)
    share = ceil_div(max(ceil_div(rows, 256), 1), tile) * tile
    programs = ceil_div(rows, share)
    parts = Launch(
        loss_part_kernel,
        (programs, 1, 1),
        (Output((programs,), "float32"),),
        (rows, columns, share),
        (tile, block),
        warps=4,
    )
    sum_up = Launch(
        loss_kernel,
        (1, 1, 1),
        (Output((1,), dtype),),
        (programs, float(factor)),
        (triton.next_power_of_2(programs),),
        warps=4,
    )
    steps = (
        step(parts, ("probs", "tokens"), ("parts",)),
        step(sum_up, ("parts", "total"), ("loss",)),
    )
    return Program(("probs", "tokens", "total"), steps, ("loss",))


def tokens_of_program(width: int) -> tuple[int, int]:
    """Choose (tokens, warps) for a program: up to 1024 experts per token fit a warp, where sums need no barrier."""
    if width > 1024:
        return 1, 4
    return max(256 // width, 1), 1

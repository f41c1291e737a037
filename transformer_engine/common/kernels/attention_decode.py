"""out = softmax(scale * q k^T) v for a few queries and many keys, which are distributed over programs.

A program computes the queries in all heads that read one key head, so that the cache is read once, for one of `splits`
ranges of a sequence's keys. `merge` adds the results of the ranges, weighted with their denominators. The ranges depend
on the sequence's length on the device, the grid on shapes only: one captured graph serves all lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..formats import ceil_div
from .attention import LOG2_E, at, extent, take_keys
from .attention_problem import AttentionProblem, decode_tile
from .launch import Launch, Output


@triton.jit
def attend_stretch(
    q,
    k,
    v,
    lengths_q,
    lengths_kv,
    starts_q,
    starts_kv,
    slopes,
    pages,
    partial,
    level,
    seqlen_q,
    seqlen_kv,
    heads,
    group,
    left,
    right,
    scale,
    bias_scale,
    cap,
    dropout,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    masked_batch,
    masked_head,
    masked_row,
    masked_column,
    bias_batch,
    bias_head,
    bias_row,
    bias_column,
    slopes_batch,
    pages_batch,
    lse_batch,
    lse_token,
    lse_head,
    blocks,
    BOTTOM_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    QK: tl.constexpr,
    QK_MAIN: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute partial [b, g, splits, rows, V] float32 and level = log2 of its denominator; row = query * group + h."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    kv_head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    sequence = tl.program_id(2)
    limit_q, start_q, length_q = extent(lengths_q, starts_q, None, seqlen_q, sequence)
    limit_kv, start_kv, length_kv = extent(lengths_kv, starts_kv, None, seqlen_kv, sequence)
    shift = 0
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    index = block * ROWS + tl.arange(0, ROWS)
    row, member = index // group, index % group
    first_row = block * ROWS // group
    last_row = tl.minimum((block * ROWS + ROWS - 1) // group, limit_q - 1)

    query = at(q, sequence, start_q, kv_head * group, q_batch, q_token, q_head)
    pointers = (
        query + (tl.cast(row, tl.int64) * q_token + tl.cast(member, tl.int64) * q_head)[:, None]
    )
    column = tl.arange(0, QK_MAIN)[None, :]
    q_main = tl.load(pointers + column, mask=(row < limit_q)[:, None] & (column < QK), other=0.0)
    q_rest = q_main
    if QK_REST:
        column = QK_MAIN + tl.arange(0, QK_REST)[None, :]
        q_rest = tl.load(
            pointers + column, mask=(row < limit_q)[:, None] & (column < QK), other=0.0
        )
    kv_sequence = sequence
    if PAGE:
        kv_sequence = 0  # the stride belongs to the pages
        pages += tl.cast(sequence, tl.int64) * pages_batch
    key = at(k, kv_sequence, start_kv, kv_head, k_batch, k_token, k_head)
    value = at(v, kv_sequence, start_kv, kv_head, v_batch, v_token, v_head)
    slope = None
    if slopes is not None:
        slope = (
            tl.load(slopes + sequence * slopes_batch + kv_head * group + member).to(tl.float32)[
                :, None
            ]
            * LOG2_E
        )

    low, high = 0, limit_kv
    full_low, full_high = 0, limit_kv
    if RIGHT:
        high = tl.maximum(tl.minimum(high, last_row + shift + right + 1), 0)
        full_high = tl.maximum(tl.minimum(full_high, first_row + shift + right + 1), 0)
    if LEFT:
        low = tl.maximum(first_row + shift - left, 0) // KEYS * KEYS
        full_low = (tl.maximum(last_row + shift - left, 0) + (KEYS - 1)) // KEYS * KEYS
    if first_row >= limit_q:
        high = low
    tiles = (tl.maximum(high - low, 0) + (KEYS - 1)) // KEYS
    share = (tiles + (splits - 1)) // splits * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, high)
    full_low = tl.minimum(tl.maximum(full_low, begin), tl.maximum(end, begin))
    full_high = tl.maximum(tl.minimum(full_high, end) // KEYS * KEYS, full_low)

    main = tl.zeros([ROWS, V_MAIN], tl.float32)
    rest = tl.zeros([ROWS, V_REST if V_REST else 1], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if LEFT:
        for first in tl.range(begin, full_low, KEYS, num_stages=STAGES):
            main, rest, top, total = take_keys(
                first,
                q_main,
                q_rest,
                main,
                rest,
                top,
                total,
                key,
                value,
                pages,
                row[:, None],
                0,
                None,
                dropout,
                shift,
                limit_q,
                limit_kv,
                left,
                right,
                scale,
                bias_scale,
                cap,
                k_batch,
                k_token,
                v_batch,
                v_token,
                None,
                None,
                0,
                0,
                None,
                0,
                0,
                slope,
                LEFT,
                RIGHT,
                CAP,
                True,
                PAGE,
                KEYS,
                QK,
                QK_MAIN,
                QK_REST,
                V,
                V_MAIN,
                V_REST,
                PRECISION,
            )
    for first in tl.range(full_low, full_high, KEYS, num_stages=STAGES):
        main, rest, top, total = take_keys(
            first,
            q_main,
            q_rest,
            main,
            rest,
            top,
            total,
            key,
            value,
            pages,
            row[:, None],
            0,
            None,
            dropout,
            shift,
            limit_q,
            limit_kv,
            left,
            right,
            scale,
            bias_scale,
            cap,
            k_batch,
            k_token,
            v_batch,
            v_token,
            None,
            None,
            0,
            0,
            None,
            0,
            0,
            slope,
            LEFT,
            RIGHT,
            CAP,
            False,
            PAGE,
            KEYS,
            QK,
            QK_MAIN,
            QK_REST,
            V,
            V_MAIN,
            V_REST,
            PRECISION,
        )
    for first in tl.range(full_high, end, KEYS, num_stages=1):
        main, rest, top, total = take_keys(
            first,
            q_main,
            q_rest,
            main,
            rest,
            top,
            total,
            key,
            value,
            pages,
            row[:, None],
            0,
            None,
            dropout,
            shift,
            limit_q,
            limit_kv,
            left,
            right,
            scale,
            bias_scale,
            cap,
            k_batch,
            k_token,
            v_batch,
            v_token,
            None,
            None,
            0,
            0,
            None,
            0,
            0,
            slope,
            LEFT,
            RIGHT,
            CAP,
            True,
            PAGE,
            KEYS,
            QK,
            QK_MAIN,
            QK_REST,
            V,
            V_MAIN,
            V_REST,
            PRECISION,
        )
    inverse = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    rows = seqlen_q * group
    stretch = (
        (tl.cast(sequence, tl.int64) * (heads // group) + kv_head) * splits + split
    ) * rows + index
    inside = index < rows
    tl.store(level + stretch, top + tl.log2(total), mask=inside)
    column = tl.arange(0, V_MAIN)[None, :]
    target = partial + stretch[:, None] * V
    tl.store(target + column, main * inverse, mask=inside[:, None] & (column < V))
    if V_REST:
        column = V_MAIN + tl.arange(0, V_REST)[None, :]
        tl.store(target + column, rest * inverse, mask=inside[:, None] & (column < V))


@triton.jit
def merge(
    partial,
    level,
    sink,
    lengths_q,
    starts_q,
    out,
    seqlen_q,
    heads,
    group,
    splits,
    out_batch,
    out_token,
    out_head,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Compute out for one query in one head: sum over ranges of 2^level partial, over the sum of 2^level and sink."""
    if FOLLOWS:
        gdc_wait()
    query, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    limit, start, _ = extent(lengths_q, starts_q, None, seqlen_q, sequence)
    rows = seqlen_q * group
    first = (tl.cast(sequence, tl.int64) * (heads // group) + head // group) * splits
    row = query * group + head % group
    column = tl.arange(0, BLOCK_V)
    top = -float("inf")
    if sink is not None:
        top = tl.load(sink + head).to(tl.float32) * LOG2_E
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        levels = tl.load(
            level + (first + split) * rows + row, mask=split < splits, other=-float("inf")
        )
        top = tl.maximum(top, tl.max(levels, 0))
    top = tl.where(top == -float("inf"), 0.0, top)
    total = 0.0
    if sink is not None:
        total = tl.exp2(tl.load(sink + head).to(tl.float32) * LOG2_E - top)
    output = tl.zeros([BLOCK_V], tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        offsets = (first + split) * rows + row
        weight = tl.exp2(tl.load(level + offsets, mask=split < splits, other=-float("inf")) - top)
        inside = (split < splits)[:, None] & (column < V)[None, :]
        values = tl.load(partial + offsets[:, None] * V + column[None, :], mask=inside, other=0.0)
        total += tl.sum(weight, 0)
        output += tl.sum(values * weight[:, None], 0)
    output = output / tl.where(total > 0.0, total, 1.0)
    output = tl.where(query < limit, output, 0.0)
    stored = column < V
    if starts_q is not None:
        stored = stored & (query < limit)
    target = (
        at(out, sequence, start, head, out_batch, out_token, out_head)
        + tl.cast(query, tl.int64) * out_token
    )
    tl.store(target + column, output.to(out.dtype.element_ty), mask=stored)


def stretches(problem: AttentionProblem, processors: int, splits: int = 0) -> tuple[Launch, int]:
    """Launch for `attend_stretch`, and the number of splits.

    Inputs: q, k, v, lengths_q, lengths_kv, starts_q, starts_kv, slopes, pages. Outputs: partial float32 [b, g, splits,
    rows, size_v] and level. splits = 0: enough ranges to fill the processors.
    """
    rows = problem.heads // problem.groups * problem.seqlen_q
    block_rows, keys, warps, stages = decode_tile(problem, rows)
    blocks = ceil_div(rows, block_rows)
    if splits == 0:
        # Two programs per processor, or 4096 keys per program if that is more ranges.
        # One sequence with 65536 keys, H200: 3.3 to 3.4 TB/s with 16 or 33 ranges, 2.9 with 66.
        filling = 2 * processors // (problem.batch * problem.groups * blocks)
        shortest = ceil_div(problem.seqlen_kv, max(keys, 128))
        splits = max(1, min(max(filling, ceil_div(problem.seqlen_kv, 4096)), shortest, 128))
    scalars = (*problem.scalars, blocks)
    constants = (
        *problem.band,
        problem.capping,
        problem.page_size,
        *problem.sizes,
        problem.precision,
        block_rows,
        keys,
        stages,
    )
    grid = (splits, problem.groups * blocks, problem.batch)
    level = (problem.batch, problem.groups, splits, rows)
    outputs = (Output((*level, problem.size_v), "float32"), Output(level, "float32"))
    return Launch(attend_stretch, grid, outputs, scalars, constants, warps), splits


def merging(problem: AttentionProblem, splits: int, follows: bool, packed: bool = False) -> Launch:
    """Launch (partial, level, sink | None, lengths_q, starts_q) -> out.

    With `packed`, tokens outside all sequences are not visited.
    """
    block = triton.next_power_of_2(problem.size_v)
    group = problem.heads // problem.groups
    scalars = (problem.seqlen_q, problem.heads, group, splits, *problem.out)
    constants = (
        problem.size_v,
        block,
        min(triton.next_power_of_2(splits), max(1, 4096 // block)),
        follows,
    )
    grid = (problem.seqlen_q, problem.heads, problem.batch)
    outputs = (Output(None, problem.dtype, begins=0.0 if packed else None),)
    return Launch(merge, grid, outputs, scalars, constants, warps=4, dependent=follows)

"""dbias = sum of p (do v^T - D) over the sequences, heads, rows and columns that share a bias element.

A program owns a bias tile and loops over the sequences and heads that read it, without atomics. Its arguments
are the same as in the backward pass's other kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .attention import LN_2, LOG2_E, at, extent, load_rows
from .attention_backward import grad_logits, statistics
from .attention_problem import AttentionProblem, bias_tile
from .launch import Launch, Output


@triton.jit
def grad_added(
    q,
    k,
    v,
    lengths_q,
    lengths_kv,
    starts_q,
    starts_kv,
    masked_q,
    masked_kv,
    masked,
    bias,
    slopes,
    rng,
    grad_out,
    lse,
    delta,
    dbias,
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
    grad_batch,
    grad_token,
    grad_head,
    sequences,
    members,
    out_heads,
    out_rows,
    out_columns,
    BOTTOM_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    QK: tl.constexpr,
    QK_MAIN: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Compute a dbias tile [.., out_heads, out_rows, out_columns], summed over the sequences and heads sharing it.

    SUM_ROWS, SUM_COLUMNS: all rows or columns share the bias, and one row or column per tile remains.
    """
    first_key, first_row = tl.program_id(0) * KEYS, tl.program_id(1) * ROWS
    plane = tl.program_id(2)
    row, column = first_row + tl.arange(0, ROWS), first_key + tl.arange(0, KEYS)
    total = tl.zeros([ROWS, KEYS], tl.float32)
    for index in range(sequences * members):
        sequence = plane // out_heads + index // members
        head = plane % out_heads + index % members
        limit_q, start_q, length_q = extent(lengths_q, starts_q, masked_q, seqlen_q, sequence)
        limit_kv, start_kv, length_kv = extent(
            lengths_kv, starts_kv, masked_kv, seqlen_kv, sequence
        )
        shift = 0
        if BOTTOM_RIGHT:
            shift = length_kv - length_q
        visible = (first_row < limit_q) & (first_key < limit_kv)
        if RIGHT:
            visible = visible & (first_key - (first_row + ROWS - 1) <= shift + right)
        if LEFT:
            visible = visible & (first_key + KEYS - 1 - first_row >= shift - left)
        if visible:
            hidden_q, hidden_kv, hidden, slope = masked_q, masked_kv, masked, None
            if masked_q is not None:
                hidden_q = masked_q + tl.cast(sequence, tl.int64) * seqlen_q
            if masked_kv is not None:
                hidden_kv = masked_kv + tl.cast(sequence, tl.int64) * seqlen_kv
            if masked is not None:
                hidden = at(masked, sequence, 0, head, masked_batch, 0, masked_head)
            if slopes is not None:
                slope = tl.load(slopes + sequence * slopes_batch + head).to(tl.float32) * LOG2_E
            added = at(bias, sequence, 0, head, bias_batch, 0, bias_head)
            query = at(q, sequence, start_q, head, q_batch, q_token, q_head)
            gradient = at(grad_out, sequence, start_q, head, grad_batch, grad_token, grad_head)
            key = at(k, sequence, start_kv, head // group, k_batch, k_token, k_head)
            value = at(v, sequence, start_kv, head // group, v_batch, v_token, v_head)
            levels = at(lse, sequence, start_q, head, lse_batch, lse_token, lse_head)
            inners = at(delta, sequence, start_q, head, lse_batch, lse_token, lse_head)
            level, inner = statistics(levels, inners, lse_token, hidden_q, row, limit_q)
            q_main = load_rows(query, first_row, q_token, limit_q, ROWS, 0, QK_MAIN, QK, True)
            g_main = load_rows(gradient, first_row, grad_token, limit_q, ROWS, 0, V_MAIN, V, True)
            q_rest, g_rest = q_main, g_main
            if QK_REST:
                q_rest = load_rows(
                    query, first_row, q_token, limit_q, ROWS, QK_MAIN, QK_REST, QK, True
                )
            if V_REST:
                g_rest = load_rows(
                    gradient, first_row, grad_token, limit_q, ROWS, V_MAIN, V_REST, V, True
                )
            grad_s, derivative, _, _ = grad_logits(
                first_key,
                q_main,
                q_rest,
                g_main,
                g_rest,
                level,
                inner,
                key,
                value,
                row[:, None],
                sequence * heads + head,
                rng,
                dropout,
                shift,
                limit_q,
                limit_kv,
                left,
                right,
                scale,
                bias_scale,
                cap,
                k_token,
                v_token,
                hidden_kv,
                hidden,
                masked_row,
                masked_column,
                added,
                bias_row,
                bias_column,
                slope,
                LEFT,
                RIGHT,
                CAP,
                True,
                KEYS,
                QK,
                QK_MAIN,
                QK_REST,
                V,
                V_MAIN,
                V_REST,
                PRECISION,
            )
            if CAP == 2:  # the softcap follows the bias
                grad_s *= derivative
            total += grad_s
    total *= bias_scale * LN_2
    row, column = row[:, None], column[None, :]
    inside = (row < seqlen_q) & (column < seqlen_kv)
    total = tl.where(inside, total, 0.0)
    if SUM_ROWS:
        total = tl.sum(total, 0)[None, :]
        row, inside = tl.program_id(1) + tl.zeros([1, 1], tl.int32), column < seqlen_kv
    if SUM_COLUMNS:
        total = tl.sum(total, 1)[:, None]
        column, inside = tl.program_id(0) + tl.zeros([1, 1], tl.int32), row < out_rows
    target = dbias + tl.cast(plane, tl.int64) * out_rows * out_columns
    pointers = target + tl.cast(row, tl.int64) * out_columns + column
    tl.store(pointers, total.to(dbias.dtype.element_ty), mask=inside)


def added(problem: AttentionProblem, shape: tuple[int, ...]) -> tuple[Launch, tuple[int, ...]]:
    """Launch (q, .., delta) -> dbias, and the shape of dbias.

    dbias is float32. If its shape is larger than the bias's shape, the caller sums it.
    """
    block_rows, block_keys, warps = bias_tile(problem)
    down, across = ceil_div(problem.seqlen_q, block_rows), ceil_div(problem.seqlen_kv, block_keys)
    batch, heads, size_q, size_kv = shape
    sums = size_q == 1, size_kv == 1
    result = (batch, heads, down if sums[0] else size_q, across if sums[1] else size_kv)
    sequences = 1 if batch > 1 else problem.batch
    members = 1 if heads > 1 else problem.heads
    scalars = (*problem.scalars, *problem.out, sequences, members, *result[1:])
    constants = (
        *problem.band,
        problem.capping,
        *problem.sizes,
        problem.precision,
        block_rows,
        block_keys,
        *sums,
    )
    outputs = (Output(result, None if result == tuple(shape) else "float32"),)
    return Launch(
        grad_added, (across, down, batch * heads), outputs, scalars, constants, warps
    ), result

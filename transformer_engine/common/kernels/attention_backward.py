"""dq = scale ds k, dk = scale ds^T q, dv = p^T do; ds = p (dp - D) c', dp = do v^T, D = sum(do o).

Probabilities are recomputed from the logits and lse. Programs that own keys sum dk and dv, programs that own queries
sum dq. No atomics are used, so that two runs give the same bits. For rows that see no key and for padding, lse is inf
here, which makes their probabilities 0. c' is the derivative of the softcap, 1 without it.

Arguments, extents and tiles are the same as in the forward pass. The kernels that own keys work on transposed tiles
[keys, rows], so that the probabilities are passed to the next product in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention import (
    LN_2,
    LOG2_E,
    at,
    extent,
    load_rows,
    logits,
    owned_tile,
    store_rows,
    survives,
    visible_keys,
)
from .attention_problem import AttentionProblem, keys_tile, queries_tile
from .launch import Launch, Output


@triton.jit
def statistics(lse, delta, lse_token, masked_q, row, limit):
    """Compute the rows' lse in units of log 2 (inf for a row without a key) and D."""
    real = row < limit
    if masked_q is not None:
        real = real & (tl.load(masked_q + row, mask=real, other=1) == 0)
    level = tl.load(lse + row * lse_token, mask=real, other=float("inf")) * LOG2_E
    inner = tl.load(delta + row * lse_token, mask=real, other=0.0)
    return tl.where(level == -float("inf"), float("inf"), level), inner


@triton.jit
def _take_rows(
    first,
    k_main,
    k_rest,
    v_main,
    v_rest,
    dk_main,
    dk_rest,
    dv_main,
    dv_rest,
    query,
    gradient,
    lse,
    delta,
    lse_token,
    column,
    stream,
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
    q_token,
    grad_token,
    masked_q,
    masked_kv,
    masked,
    masked_row,
    masked_column,
    bias,
    bias_row,
    bias_column,
    slope,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    EDGE: tl.constexpr,
    ROWS: tl.constexpr,
    QK: tl.constexpr,
    QK_MAIN: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one query tile to a key tile's running dk and dv; tiles are [keys, rows]."""
    q_main = load_rows(query, first, q_token, limit_q, ROWS, 0, QK_MAIN, QK, True)
    product = tl.dot(k_main, tl.trans(q_main), input_precision=PRECISION)
    if QK_REST:
        q_rest = load_rows(query, first, q_token, limit_q, ROWS, QK_MAIN, QK_REST, QK, True)
        product = tl.dot(k_rest, tl.trans(q_rest), product, input_precision=PRECISION)
    row = first + tl.arange(0, ROWS)
    score, derivative = logits(
        product,
        row[None, :],
        column,
        shift,
        limit_q,
        limit_kv,
        left,
        right,
        scale,
        bias_scale,
        cap,
        masked_kv,
        masked,
        masked_row,
        masked_column,
        bias,
        bias_row,
        bias_column,
        slope,
        LEFT,
        RIGHT,
        CAP,
        EDGE,
        PRECISION == "ieee",
    )
    level, inner = statistics(lse, delta, lse_token, masked_q, row, limit_q)
    probability = tl.exp2(score - level[None, :])
    g_main = load_rows(gradient, first, grad_token, limit_q, ROWS, 0, V_MAIN, V, True)
    grad_p = tl.dot(v_main, tl.trans(g_main), input_precision=PRECISION)
    if V_REST:
        g_rest = load_rows(gradient, first, grad_token, limit_q, ROWS, V_MAIN, V_REST, V, True)
        grad_p = tl.dot(v_rest, tl.trans(g_rest), grad_p, input_precision=PRECISION)
    weight = probability
    if rng is not None:
        keep = survives(rng, row[None, :], column, stream, dropout)
        weight = tl.where(keep, probability / (1.0 - dropout), 0.0)
        grad_p = tl.where(keep, grad_p / (1.0 - dropout), 0.0)
    weight = weight.to(query.dtype.element_ty)
    dv_main = tl.dot(weight, g_main, dv_main, input_precision=PRECISION)
    if V_REST:
        dv_rest = tl.dot(weight, g_rest, dv_rest, input_precision=PRECISION)
    grad_s = probability * (grad_p - inner[None, :])
    if CAP:
        grad_s *= derivative
    grad_s = grad_s.to(query.dtype.element_ty)
    dk_main = tl.dot(grad_s, q_main, dk_main, input_precision=PRECISION)
    if QK_REST:
        dk_rest = tl.dot(grad_s, q_rest, dk_rest, input_precision=PRECISION)
    return dk_main, dk_rest, dv_main, dv_rest


@triton.jit
def grad_keys(
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
    dk,
    dv,
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
    members,
    parts,
    dk_part,
    dk_batch,
    dk_token,
    dk_head,
    dv_part,
    dv_batch,
    dv_token,
    dv_head,
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
    STAGES: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Compute dk and dv for KEYS keys in one head, summed over the group's `members` query heads."""
    block, sequence = owned_tile(lengths_kv, tl.program_id(0), seqlen_kv, KEYS, SEQUENCES)
    kv_head, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    limit_q, start_q, length_q = extent(lengths_q, starts_q, masked_q, seqlen_q, sequence)
    limit_kv, start_kv, length_kv = extent(lengths_kv, starts_kv, masked_kv, seqlen_kv, sequence)
    first_key = block * KEYS
    stored = seqlen_kv
    if starts_kv is not None:
        stored = limit_kv
        if first_key >= limit_kv:
            return
    shift = 0
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    key = at(k, sequence, start_kv, kv_head, k_batch, k_token, k_head)
    value = at(v, sequence, start_kv, kv_head, v_batch, v_token, v_head)
    k_main = load_rows(key, first_key, k_token, limit_kv, KEYS, 0, QK_MAIN, QK, True)
    v_main = load_rows(value, first_key, v_token, limit_kv, KEYS, 0, V_MAIN, V, True)
    k_rest, v_rest = k_main, v_main
    if QK_REST:
        k_rest = load_rows(key, first_key, k_token, limit_kv, KEYS, QK_MAIN, QK_REST, QK, True)
    if V_REST:
        v_rest = load_rows(value, first_key, v_token, limit_kv, KEYS, V_MAIN, V_REST, V, True)
    dk_main = tl.zeros([KEYS, QK_MAIN], tl.float32)
    dk_rest = tl.zeros([KEYS, QK_REST if QK_REST else 1], tl.float32)
    dv_main = tl.zeros([KEYS, V_MAIN], tl.float32)
    dv_rest = tl.zeros([KEYS, V_REST if V_REST else 1], tl.float32)
    if masked_q is not None:
        masked_q += tl.cast(sequence, tl.int64) * seqlen_q
    if masked_kv is not None:
        masked_kv += tl.cast(sequence, tl.int64) * seqlen_kv
    column = first_key + tl.arange(0, KEYS)[:, None]

    last_key = tl.minimum(first_key + KEYS, limit_kv) - 1
    low, full_low, full_high, high = 0, 0, limit_q, limit_q
    if RIGHT:
        low = tl.maximum(first_key - shift - right, 0) // ROWS * ROWS
        full_low = (tl.maximum(last_key - shift - right, 0) + (ROWS - 1)) // ROWS * ROWS
    if LEFT:
        high = tl.maximum(tl.minimum(high, last_key - shift + left + 1), 0)
        full_high = (
            tl.maximum(tl.minimum(full_high, first_key - shift + left + 1), 0) // ROWS * ROWS
        )
    high = tl.where(first_key < limit_kv, tl.maximum(high, low), low)
    full_low = tl.where(first_key + KEYS <= limit_kv, tl.minimum(full_low, high), high)
    full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    for member in range(members):
        head = kv_head * group + part * members + member
        stream = sequence * heads + head
        query = at(q, sequence, start_q, head, q_batch, q_token, q_head)
        gradient = at(grad_out, sequence, start_q, head, grad_batch, grad_token, grad_head)
        levels = at(lse, sequence, start_q, head, lse_batch, lse_token, lse_head)
        inner = at(delta, sequence, start_q, head, lse_batch, lse_token, lse_head)
        hidden, added, slope = masked, bias, None
        if masked is not None:
            hidden = at(masked, sequence, 0, head, masked_batch, 0, masked_head)
        if bias is not None:
            added = at(bias, sequence, 0, head, bias_batch, 0, bias_head)
        if slopes is not None:
            slope = tl.load(slopes + sequence * slopes_batch + head).to(tl.float32) * LOG2_E
        for first in tl.range(low, full_low, ROWS, num_stages=STAGES):
            dk_main, dk_rest, dv_main, dv_rest = _take_rows(
                first,
                k_main,
                k_rest,
                v_main,
                v_rest,
                dk_main,
                dk_rest,
                dv_main,
                dv_rest,
                query,
                gradient,
                levels,
                inner,
                lse_token,
                column,
                stream,
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
                q_token,
                grad_token,
                masked_q,
                masked_kv,
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
                ROWS,
                QK,
                QK_MAIN,
                QK_REST,
                V,
                V_MAIN,
                V_REST,
                PRECISION,
            )
        for first in tl.range(full_low, full_high, ROWS, num_stages=STAGES):
            dk_main, dk_rest, dv_main, dv_rest = _take_rows(
                first,
                k_main,
                k_rest,
                v_main,
                v_rest,
                dk_main,
                dk_rest,
                dv_main,
                dv_rest,
                query,
                gradient,
                levels,
                inner,
                lse_token,
                column,
                stream,
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
                q_token,
                grad_token,
                masked_q,
                masked_kv,
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
                False,
                ROWS,
                QK,
                QK_MAIN,
                QK_REST,
                V,
                V_MAIN,
                V_REST,
                PRECISION,
            )
        if LEFT:
            for first in tl.range(full_high, high, ROWS, num_stages=STAGES):
                dk_main, dk_rest, dv_main, dv_rest = _take_rows(
                    first,
                    k_main,
                    k_rest,
                    v_main,
                    v_rest,
                    dk_main,
                    dk_rest,
                    dv_main,
                    dv_rest,
                    query,
                    gradient,
                    levels,
                    inner,
                    lse_token,
                    column,
                    stream,
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
                    q_token,
                    grad_token,
                    masked_q,
                    masked_kv,
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
                    ROWS,
                    QK,
                    QK_MAIN,
                    QK_REST,
                    V,
                    V_MAIN,
                    V_REST,
                    PRECISION,
                )
    grad_k = (
        at(dk, sequence, start_kv, kv_head, dk_batch, dk_token, dk_head)
        + tl.cast(part, tl.int64) * dk_part
    )
    grad_v = (
        at(dv, sequence, start_kv, kv_head, dv_batch, dv_token, dv_head)
        + tl.cast(part, tl.int64) * dv_part
    )
    factor = scale * LN_2
    store_rows(grad_k, first_key, dk_token, stored, dk_main * factor, KEYS, 0, QK_MAIN, QK)
    store_rows(grad_v, first_key, dv_token, stored, dv_main, KEYS, 0, V_MAIN, V)
    if QK_REST:
        store_rows(
            grad_k, first_key, dk_token, stored, dk_rest * factor, KEYS, QK_MAIN, QK_REST, QK
        )
    if V_REST:
        store_rows(grad_v, first_key, dv_token, stored, dv_rest, KEYS, V_MAIN, V_REST, V)


@triton.jit
def grad_logits(
    first,
    q_main,
    q_rest,
    g_main,
    g_rest,
    level,
    inner,
    key,
    value,
    row,
    stream,
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
    masked_kv,
    masked,
    masked_row,
    masked_column,
    bias,
    bias_row,
    bias_column,
    slope,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    EDGE: tl.constexpr,
    KEYS: tl.constexpr,
    QK: tl.constexpr,
    QK_MAIN: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute p (dp - D) float32 [rows, KEYS], the softcap's derivative, and the two key parts."""
    k_main = load_rows(key, first, k_token, limit_kv, KEYS, 0, QK_MAIN, QK, EDGE)
    k_rest = k_main
    product = tl.dot(q_main, tl.trans(k_main), input_precision=PRECISION)
    if QK_REST:
        k_rest = load_rows(key, first, k_token, limit_kv, KEYS, QK_MAIN, QK_REST, QK, EDGE)
        product = tl.dot(q_rest, tl.trans(k_rest), product, input_precision=PRECISION)
    column = first + tl.arange(0, KEYS)[None, :]
    score, derivative = logits(
        product,
        row,
        column,
        shift,
        limit_q,
        limit_kv,
        left,
        right,
        scale,
        bias_scale,
        cap,
        masked_kv,
        masked,
        masked_row,
        masked_column,
        bias,
        bias_row,
        bias_column,
        slope,
        LEFT,
        RIGHT,
        CAP,
        EDGE,
        PRECISION == "ieee",
    )
    probability = tl.exp2(score - level[:, None])
    tile = load_rows(value, first, v_token, limit_kv, KEYS, 0, V_MAIN, V, EDGE)
    grad_p = tl.dot(g_main, tl.trans(tile), input_precision=PRECISION)
    if V_REST:
        tile = load_rows(value, first, v_token, limit_kv, KEYS, V_MAIN, V_REST, V, EDGE)
        grad_p = tl.dot(g_rest, tl.trans(tile), grad_p, input_precision=PRECISION)
    if rng is not None:
        grad_p = tl.where(
            survives(rng, row, column, stream, dropout), grad_p / (1.0 - dropout), 0.0
        )
    return probability * (grad_p - inner[:, None]), derivative, k_main, k_rest


@triton.jit
def grad_queries(
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
    dq,
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
    dq_batch,
    dq_token,
    dq_head,
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
    STAGES: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Compute dq for ROWS queries in one head."""
    last = tl.num_programs(0) - 1 - tl.program_id(0)
    block, sequence = owned_tile(lengths_q, last, seqlen_q, ROWS, SEQUENCES)
    head = tl.program_id(1)
    limit_q, start_q, length_q = extent(lengths_q, starts_q, masked_q, seqlen_q, sequence)
    limit_kv, start_kv, length_kv = extent(lengths_kv, starts_kv, masked_kv, seqlen_kv, sequence)
    first_row = block * ROWS
    stored = seqlen_q
    if starts_q is not None:
        stored = limit_q
        if first_row >= limit_q:
            return
    shift = 0
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    row = first_row + tl.arange(0, ROWS)
    query = at(q, sequence, start_q, head, q_batch, q_token, q_head)
    gradient = at(grad_out, sequence, start_q, head, grad_batch, grad_token, grad_head)
    key = at(k, sequence, start_kv, head // group, k_batch, k_token, k_head)
    value = at(v, sequence, start_kv, head // group, v_batch, v_token, v_head)
    if masked_q is not None:
        masked_q += tl.cast(sequence, tl.int64) * seqlen_q
    if masked_kv is not None:
        masked_kv += tl.cast(sequence, tl.int64) * seqlen_kv
    if masked is not None:
        masked = at(masked, sequence, 0, head, masked_batch, 0, masked_head)
    if bias is not None:
        bias = at(bias, sequence, 0, head, bias_batch, 0, bias_head)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + sequence * slopes_batch + head).to(tl.float32) * LOG2_E
    level, inner = statistics(
        at(lse, sequence, start_q, head, lse_batch, lse_token, lse_head),
        at(delta, sequence, start_q, head, lse_batch, lse_token, lse_head),
        lse_token,
        masked_q,
        row,
        limit_q,
    )
    q_main = load_rows(query, first_row, q_token, limit_q, ROWS, 0, QK_MAIN, QK, True)
    g_main = load_rows(gradient, first_row, grad_token, limit_q, ROWS, 0, V_MAIN, V, True)
    q_rest, g_rest = q_main, g_main
    if QK_REST:
        q_rest = load_rows(query, first_row, q_token, limit_q, ROWS, QK_MAIN, QK_REST, QK, True)
    if V_REST:
        g_rest = load_rows(gradient, first_row, grad_token, limit_q, ROWS, V_MAIN, V_REST, V, True)
    dq_main = tl.zeros([ROWS, QK_MAIN], tl.float32)
    dq_rest = tl.zeros([ROWS, QK_REST if QK_REST else 1], tl.float32)
    stream = sequence * heads + head
    low, full_low, full_high, high = visible_keys(
        first_row, limit_q, limit_kv, shift, left, right, LEFT, RIGHT, ROWS, KEYS
    )
    if first_row >= limit_q:
        full_low, full_high, high = low, low, low
    if LEFT:
        for first in tl.range(low, full_low, KEYS, num_stages=STAGES):
            grad_s, derivative, k_main, k_rest = grad_logits(
                first,
                q_main,
                q_rest,
                g_main,
                g_rest,
                level,
                inner,
                key,
                value,
                row[:, None],
                stream,
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
                masked_kv,
                masked,
                masked_row,
                masked_column,
                bias,
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
            if CAP:
                grad_s *= derivative
            dq_main = tl.dot(
                grad_s.to(q.dtype.element_ty), k_main, dq_main, input_precision=PRECISION
            )
            if QK_REST:
                dq_rest = tl.dot(
                    grad_s.to(q.dtype.element_ty), k_rest, dq_rest, input_precision=PRECISION
                )
    for first in tl.range(full_low, full_high, KEYS, num_stages=STAGES):
        grad_s, derivative, k_main, k_rest = grad_logits(
            first,
            q_main,
            q_rest,
            g_main,
            g_rest,
            level,
            inner,
            key,
            value,
            row[:, None],
            stream,
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
            masked_kv,
            masked,
            masked_row,
            masked_column,
            bias,
            bias_row,
            bias_column,
            slope,
            LEFT,
            RIGHT,
            CAP,
            False,
            KEYS,
            QK,
            QK_MAIN,
            QK_REST,
            V,
            V_MAIN,
            V_REST,
            PRECISION,
        )
        if CAP:
            grad_s *= derivative
        dq_main = tl.dot(grad_s.to(q.dtype.element_ty), k_main, dq_main, input_precision=PRECISION)
        if QK_REST:
            dq_rest = tl.dot(
                grad_s.to(q.dtype.element_ty), k_rest, dq_rest, input_precision=PRECISION
            )
    for first in tl.range(full_high, high, KEYS, num_stages=STAGES):
        grad_s, derivative, k_main, k_rest = grad_logits(
            first,
            q_main,
            q_rest,
            g_main,
            g_rest,
            level,
            inner,
            key,
            value,
            row[:, None],
            stream,
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
            masked_kv,
            masked,
            masked_row,
            masked_column,
            bias,
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
        if CAP:
            grad_s *= derivative
        dq_main = tl.dot(grad_s.to(q.dtype.element_ty), k_main, dq_main, input_precision=PRECISION)
        if QK_REST:
            dq_rest = tl.dot(
                grad_s.to(q.dtype.element_ty), k_rest, dq_rest, input_precision=PRECISION
            )
    target = at(dq, sequence, start_q, head, dq_batch, dq_token, dq_head)
    store_rows(target, first_row, dq_token, stored, dq_main * (scale * LN_2), ROWS, 0, QK_MAIN, QK)
    if QK_REST:
        store_rows(
            target,
            first_row,
            dq_token,
            stored,
            dq_rest * (scale * LN_2),
            ROWS,
            QK_MAIN,
            QK_REST,
            QK,
        )


def keys(
    problem: AttentionProblem,
    dk: tuple[int, int, int, int],
    dv: tuple[int, int, int, int],
    parts: int,
    packed: bool = False,
) -> Launch:
    """Launch (q, .., delta) -> dk, dv with strides (part, batch, token, head).

    Each part sums an even share of a group's heads. Several parts are float32, and the caller sums them. With `packed`,
    tokens outside all sequences are not visited.
    """
    block_rows, block_keys, warps, stages = keys_tile(problem)
    members = problem.heads // problem.groups // parts
    scalars = (*problem.scalars, *problem.out, members, parts, *dk, *dv)
    programs, sequences = problem.key_tiles(block_keys)
    tile = (block_rows, block_keys, stages, sequences)
    constants = (*problem.band, problem.capping, *problem.sizes, problem.precision, *tile)
    grid = (programs, problem.groups * parts, 1 if sequences else problem.batch)
    gradient = Output(
        None, problem.dtype if parts == 1 else "float32", begins=0.0 if packed else None
    )
    fuses = not problem.batch_invariant
    return Launch(grad_keys, grid, (gradient, gradient), scalars, constants, warps, fuses=fuses)


def queries(problem: AttentionProblem, dq: tuple[int, int, int], packed: bool = False) -> Launch:
    """Launch (q, .., delta) -> dq with strides (batch, token, head).

    With `packed`, tokens outside all sequences are not visited.
    """
    block_rows, block_keys, warps, stages = queries_tile(problem)
    scalars = (*problem.scalars, *problem.out, *dq)
    programs, sequences = problem.query_tiles(block_rows)
    tile = (block_rows, block_keys, stages, sequences)
    constants = (*problem.band, problem.capping, *problem.sizes, problem.precision, *tile)
    grid = (programs, problem.heads, 1 if sequences else problem.batch)
    outputs = (Output(None, problem.dtype, begins=0.0 if packed else None),)
    fuses = not problem.batch_invariant
    return Launch(grad_queries, grid, outputs, scalars, constants, warps, fuses=fuses)

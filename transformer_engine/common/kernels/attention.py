"""out [i, d] = sum_j p v[j], p = exp(s - lse), s = softcap(scale * q k^T) + bias where visible, tile by tile.

One program computes ROWS queries in one head and loops over the keys, KEYS per iteration. Logits are in units of log 2,
so that exp2 computes the probabilities. Key j is visible to query i if -left <= j - i - shift <= right, j is inside the
sequence, and no mask hides it; tiles that are entirely inside the band skip this test.

q [.., h, QK], k [.., g, QK] and v [.., g, V] have unit stride along the head size and any other strides: a sequence
begins at batch * stride + start * token stride. A size that is not a power of two is split into two parts, QK = QK_MAIN
+ QK_REST, instead of being padded to the next power: 192 costs 128 + 64, not 256.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..formats import ceil_div
from .attention_problem import AttentionProblem, forward_tile
from .launch import Launch, Output

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def extent(lengths, starts, masked, size, sequence):
    """Get a sequence's (tokens to visit, offset of the first, valid tokens); a mask can make any token valid."""
    length = size
    if lengths is not None:
        length = tl.load(lengths + sequence)
    start = 0
    if starts is not None:
        start = tl.load(starts + sequence)
    limit = length
    if masked is not None:
        limit = size
    return limit, start, length


@triton.jit
def owned_tile(lengths, program, size, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Map a program to (tile, sequence); a program without work gets a tile behind all rows.

    Args:
        size: Longest sequence length.
        SEQUENCES: Number of sequences that share a head's programs, tile after tile. 0: the grid's third axis is the
            sequence.
    """
    if SEQUENCES == 0:
        return program, tl.program_id(2)
    else:
        index = tl.arange(0, triton.next_power_of_2(SEQUENCES))
        length = tl.load(lengths + index, mask=index < SEQUENCES, other=0)
        ends = tl.cumsum((length + (ROWS - 1)) // ROWS, 0)
        before = ends <= program
        sequence = tl.sum(before.to(tl.int32), 0)
        tile = program - tl.max(tl.where(before, ends, 0), 0)
        valid = sequence < SEQUENCES
        return tl.where(valid, tile, tl.cdiv(size, ROWS)), tl.where(valid, sequence, 0)


@triton.jit
def at(pointer, sequence, start, head, batch_stride, token_stride, head_stride):
    """Pointer to the first token in one head of a sequence."""
    offset = tl.cast(sequence, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride
    return pointer + offset + tl.cast(start, tl.int64) * token_stride


@triton.jit
def load_rows(
    matrix,
    first,
    stride,
    limit,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Load elements (first + i, COLUMN + j) from a matrix [limit, WIDTH], 0 outside; CHECK: rows can be outside."""
    row = tl.arange(0, ROWS)[:, None]
    column = COLUMN + tl.arange(0, COLUMNS)[None, :]
    pointers = matrix + tl.cast(first, tl.int64) * stride + (row * stride + column)
    if CHECK:
        inside = first + row < limit
        if COLUMN + COLUMNS > WIDTH:
            inside = inside & (column < WIDTH)
        return tl.load(pointers, mask=inside, other=0.0)
    elif COLUMN + COLUMNS > WIDTH:
        return tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_paged_rows(
    matrix,
    pages,
    first,
    page_stride,
    stride,
    limit,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Same as load_rows, with token i in page pages[i // PAGE]; PAGE = 0: the sequence is contiguous."""
    if PAGE == 0:
        return load_rows(matrix, first, stride, limit, ROWS, COLUMN, COLUMNS, WIDTH, CHECK)
    elif PAGE % ROWS == 0:
        page = tl.load(pages + first // PAGE)  # first < limit, so that the entry is a valid page
        start = matrix + tl.cast(page, tl.int64) * page_stride
        within = first % PAGE
        return load_rows(
            start, within, stride, limit - first + within, ROWS, COLUMN, COLUMNS, WIDTH, CHECK
        )
    else:
        index = first + tl.arange(0, ROWS)
        page = tl.load(pages + index // PAGE, mask=index < limit, other=0)
        column = COLUMN + tl.arange(0, COLUMNS)[None, :]
        row = tl.cast(page, tl.int64) * page_stride + (index % PAGE) * stride
        inside = (index < limit)[:, None] & (column < WIDTH)
        return tl.load(matrix + row[:, None] + column, mask=inside, other=0.0)


@triton.jit
def store_rows(
    matrix,
    first,
    stride,
    limit,
    values,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store values to elements (first + i, COLUMN + j) in a matrix [limit, WIDTH]."""
    row = tl.arange(0, ROWS)[:, None]
    column = COLUMN + tl.arange(0, COLUMNS)[None, :]
    pointers = matrix + tl.cast(first, tl.int64) * stride + (row * stride + column)
    tl.store(
        pointers, values.to(matrix.dtype.element_ty), mask=(first + row < limit) & (column < WIDTH)
    )


@triton.jit
def cap_value(value, cap, EXACT: tl.constexpr):
    """Compute cap * tanh(value / cap) and its derivative; EXACT: small values have the relative error of float32."""
    ratio = value * (1.0 / cap)
    size = tl.abs(ratio)
    # tanh(x) = (1 - u) / (1 + u), u = exp(-2 x), cannot overflow
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    inverse = 1.0 / (1.0 + decay)
    result = (1.0 - decay) * inverse
    if EXACT:  # 1 - u cancels; the series' first omitted term is 5e-8 x at x = 0.3
        square = ratio * ratio
        series = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
        result = tl.where(size < 0.3, size + size * square * (-1.0 / 3.0 + square * series), result)
    return tl.where(ratio < 0.0, -result, result) * cap, 4.0 * decay * inverse * inverse


@triton.jit
def logits(
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
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CAP: tl.constexpr,
    EDGE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute log2(e) * (softcap(scale * product) + bias), -inf where not visible, and the softcap's derivative.

    `row` and `column` broadcast to product's shape. `masked_kv` is the sequence's padding mask; `masked` and `bias` are
    the matrices of this head. CAP: see `AttentionProblem.capping`.
    """
    value, derivative = product * scale, 1.0
    inside = (row < limit_q) & (column < limit_kv)
    if CAP == 1:
        value, derivative = cap_value(value, cap, EXACT)
    if bias is not None:
        pointers = (
            bias + tl.cast(row, tl.int64) * bias_row + tl.cast(column, tl.int64) * bias_column
        )
        value += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * bias_scale
    if CAP == 2:
        value, derivative = cap_value(value, cap, EXACT)
    if slope is not None:
        value -= slope * tl.abs(column - row - shift).to(tl.float32)
    if EDGE:
        visible = column < limit_kv
        if RIGHT:
            visible = visible & (column - row <= shift + right)
        if LEFT:
            visible = visible & (column - row >= shift - left)
        value = tl.where(visible, value, -float("inf"))
    if masked_kv is not None:
        hidden = tl.load(masked_kv + column, mask=column < limit_kv, other=1)
        value = tl.where(hidden != 0, -float("inf"), value)
    if masked is not None:
        pointers = (
            masked + tl.cast(row, tl.int64) * masked_row + tl.cast(column, tl.int64) * masked_column
        )
        value = tl.where(tl.load(pointers, mask=inside, other=1) != 0, -float("inf"), value)
    return value, derivative


@triton.jit
def survives(rng, row, column, stream, dropout):
    """Whether dropout keeps the probability (row, column) in a head, by Philox of (seed, offset) in both passes.

    The offset's upper half counts the heads of sequences on other devices.
    """
    zero = row * 0 + column * 0
    offset = tl.load(rng + 1)
    low, high = offset.to(tl.int32), (offset >> 32).to(tl.int32)
    bits, _, _, _ = tl.philox(
        tl.load(rng), zero + column, zero + row, zero + (stream + high), zero + low, 7
    )
    return tl.uint_to_uniform_float(bits) >= dropout


@triton.jit
def visible_keys(
    first_row,
    limit_q,
    limit_kv,
    shift,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Key ranges (low, full_low, full_high, high): keys that some rows see, and full tiles that all rows see."""
    last_row = tl.minimum(first_row + ROWS, limit_q) - 1
    low = 0
    high = limit_kv
    full_low = 0
    full_high = limit_kv
    if RIGHT:
        high = tl.maximum(tl.minimum(high, last_row + shift + right + 1), 0)
        full_high = tl.maximum(tl.minimum(full_high, first_row + shift + right + 1), 0)
    if LEFT:
        low = tl.maximum(first_row + shift - left, 0) // KEYS * KEYS
        full_low = (tl.maximum(last_row + shift - left, 0) + (KEYS - 1)) // KEYS * KEYS
        full_low = tl.minimum(full_low, tl.maximum(high, low))
    full_high = tl.maximum(full_high // KEYS * KEYS, full_low)
    return low, full_low, full_high, high


@triton.jit
def take_keys(
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
    k_batch,
    k_token,
    v_batch,
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
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    QK: tl.constexpr,
    QK_MAIN: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one key tile to the running output (two parts), largest logit and denominator."""
    tile = load_paged_rows(
        key, pages, first, k_batch, k_token, limit_kv, KEYS, 0, QK_MAIN, QK, EDGE, PAGE
    )
    product = tl.dot(q_main, tl.trans(tile), input_precision=PRECISION)
    if QK_REST:
        tile = load_paged_rows(
            key, pages, first, k_batch, k_token, limit_kv, KEYS, QK_MAIN, QK_REST, QK, EDGE, PAGE
        )
        product = tl.dot(q_rest, tl.trans(tile), product, input_precision=PRECISION)
    column = first + tl.arange(0, KEYS)[None, :]
    score, _ = logits(
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
    # These maxima drop NaN, and the total becomes NaN. An infinite score makes the total infinite.
    best = tl.maximum(top, tl.max(score, 1))
    finite = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    shrink = tl.exp2(top - finite)
    probability = tl.exp2(score - finite[:, None])
    total = total * shrink + tl.sum(probability, 1)
    if rng is not None:
        probability = tl.where(survives(rng, row, column, stream, dropout), probability, 0.0)
    weight = probability.to(value.dtype.element_ty)
    tile = load_paged_rows(
        value, pages, first, v_batch, v_token, limit_kv, KEYS, 0, V_MAIN, V, EDGE, PAGE
    )
    main = tl.dot(weight, tile, main * shrink[:, None], input_precision=PRECISION)
    if V_REST:
        tile = load_paged_rows(
            value, pages, first, v_batch, v_token, limit_kv, KEYS, V_MAIN, V_REST, V, EDGE, PAGE
        )
        rest = tl.dot(weight, tile, rest * shrink[:, None], input_precision=PRECISION)
    return main, rest, best, total


@triton.jit
def attend(
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
    sink,
    rng,
    pages,
    out,
    lse,
    tops,
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
    out_batch,
    out_token,
    out_head,
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
    SEQUENCES: tl.constexpr,
):
    """Compute out and lse for ROWS queries in one head, and in tops every tile's largest logit."""
    # under a causal mask, the last tile has the most work
    last = tl.num_programs(0) - 1 - tl.program_id(0)
    block, sequence = owned_tile(lengths_q, last, seqlen_q, ROWS, SEQUENCES)
    head = tl.program_id(1)
    limit_q, start_q, length_q = extent(lengths_q, starts_q, masked_q, seqlen_q, sequence)
    limit_kv, start_kv, length_kv = extent(lengths_kv, starts_kv, masked_kv, seqlen_kv, sequence)
    first_row = block * ROWS
    offset = (sequence * heads + head) * tl.maximum(tl.cdiv(seqlen_q, ROWS), 1) + block
    stored = seqlen_q
    if starts_q is not None:
        stored = limit_q
        if first_row >= limit_q:  # this tile has no token
            if tops is not None and SEQUENCES == 0:
                tl.store(tops + offset, -float("inf"))
            return
    shift = 0
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    row = first_row + tl.arange(0, ROWS)
    query = at(q, sequence, start_q, head, q_batch, q_token, q_head)
    kv_head, kv_sequence = head // group, sequence
    if PAGE:
        kv_sequence = 0  # the stride belongs to the pages
        pages += tl.cast(sequence, tl.int64) * pages_batch
    key = at(k, kv_sequence, start_kv, kv_head, k_batch, k_token, k_head)
    value = at(v, kv_sequence, start_kv, kv_head, v_batch, v_token, v_head)
    if masked_kv is not None:
        masked_kv += tl.cast(sequence, tl.int64) * seqlen_kv
    if masked is not None:
        masked = at(masked, sequence, 0, head, masked_batch, 0, masked_head)
    if bias is not None:
        bias = at(bias, sequence, 0, head, bias_batch, 0, bias_head)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + sequence * slopes_batch + head).to(tl.float32) * LOG2_E
    q_main = load_rows(query, first_row, q_token, limit_q, ROWS, 0, QK_MAIN, QK, True)
    q_rest = q_main
    if QK_REST:
        q_rest = load_rows(query, first_row, q_token, limit_q, ROWS, QK_MAIN, QK_REST, QK, True)
    main = tl.zeros([ROWS, V_MAIN], tl.float32)
    rest = tl.zeros([ROWS, V_REST if V_REST else 1], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    stream = sequence * heads + head
    low, full_low, full_high, high = visible_keys(
        first_row, limit_q, limit_kv, shift, left, right, LEFT, RIGHT, ROWS, KEYS
    )
    if first_row >= limit_q:
        full_low, full_high, high = low, low, low
    if LEFT:
        for first in tl.range(low, full_low, KEYS, num_stages=STAGES):
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
                k_batch,
                k_token,
                v_batch,
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
            k_batch,
            k_token,
            v_batch,
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
    for first in tl.range(full_high, high, KEYS, num_stages=STAGES):
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
            k_batch,
            k_token,
            v_batch,
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

    real = row < limit_q
    if masked_q is not None:
        hidden = tl.load(
            masked_q + tl.cast(sequence, tl.int64) * seqlen_q + row, mask=real, other=1
        )
        real = real & (hidden == 0)
    top = tl.where(real, top, -float("inf"))
    total = tl.where(real, total, 0.0)
    if tops is not None:
        has_nan = tl.max((total != total).to(tl.int32), 0) > 0
        tl.store(tops + offset, tl.where(has_nan, float("nan"), tl.max(top, 0) * LN_2))
    share = 1.0
    if sink is not None:
        weight = tl.load(sink + head).to(tl.float32) * LOG2_E
        best = tl.maximum(top, weight)
        finite = tl.where(tl.abs(best) == float("inf"), 0.0, best)
        share = tl.exp2(top - finite)
        total = total * share + tl.exp2(weight - finite)
        top = best
    inverse = share / tl.where(total > 0.0, total, 1.0)
    if rng is not None:
        inverse = inverse / (1.0 - dropout)
    if lse is not None:
        levels = at(lse, sequence, start_q, head, lse_batch, lse_token, lse_head)
        tl.store(levels + row * lse_token, (top + tl.log2(total)) * LN_2, mask=row < stored)
    target = at(out, sequence, start_q, head, out_batch, out_token, out_head)
    main = tl.where(real[:, None], main * inverse[:, None], 0.0)
    store_rows(target, first_row, out_token, stored, main, ROWS, 0, V_MAIN, V)
    if V_REST:
        rest = tl.where(real[:, None], rest * inverse[:, None], 0.0)
        store_rows(target, first_row, out_token, stored, rest, ROWS, V_MAIN, V_REST, V)


def forward(
    problem: AttentionProblem, max_logit: bool, keeps_lse: bool = True, packed: bool = False
) -> Launch:
    """Forward-pass launch.

    Inputs: q, k, v, lengths_q, lengths_kv, starts_q, starts_kv, masked_q, masked_kv, masked, bias, slopes, sink, rng,
    pages. Outputs: out, lse if keeps_lse, and with max_logit float32 [b, h, tiles of the longest sequence].

    Args:
        packed: q is packed, and tokens outside all sequences are not visited.
    """
    rows, keys, warps, stages = forward_tile(problem)
    scalars = (*problem.scalars, *problem.out)
    kind = (*problem.band, problem.capping, problem.page_size)
    constants = (*kind, *problem.sizes, problem.precision, rows, keys, stages)
    programs, sequences = problem.query_tiles(rows)
    tops = (problem.batch, problem.heads, max(1, ceil_div(problem.seqlen_q, rows)))
    outputs = (
        Output(None, problem.dtype, begins=0.0 if packed else None),
        Output(None, "float32", begins=-math.inf if packed else None) if keeps_lse else None,
        Output(tops, "float32", begins=-math.inf if sequences else None) if max_logit else None,
    )
    grid = (max(1, programs), problem.heads, 1 if sequences else problem.batch)
    fuses = not problem.batch_invariant
    return Launch(attend, grid, outputs, scalars, (*constants, sequences), warps, fuses=fuses)

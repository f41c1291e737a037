"""D = sum_d do o for every row, which the query and key gradients read, and the sink's gradient.

Arguments and extents are the same as in the forward pass (attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import ceil_div
from .attention import LOG2_E, at, extent, load_rows, owned_tile
from .attention_problem import AttentionProblem
from .launch import Launch, Output


@triton.jit
def row_products(
    out,
    grad_out,
    lse,
    sink,
    lengths_q,
    starts_q,
    masked_q,
    delta,
    grad_sink,
    seqlen_q,
    lse_batch,
    lse_token,
    lse_head,
    out_batch,
    out_token,
    out_head,
    grad_batch,
    grad_token,
    grad_head,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Compute delta [.., i] = sum_d do o, and grad_sink [b, h, blocks] = -sum_i p_sink delta."""
    block, sequence = owned_tile(lengths_q, tl.program_id(0), seqlen_q, ROWS, SEQUENCES)
    head = tl.program_id(1)
    limit, start, _ = extent(lengths_q, starts_q, masked_q, seqlen_q, sequence)
    first = block * ROWS
    partial = (sequence * tl.num_programs(1) + head) * tl.cdiv(seqlen_q, ROWS) + block
    stored = seqlen_q
    if starts_q is not None:
        stored = limit
        if first >= limit:
            if sink is not None and SEQUENCES == 0:
                tl.store(grad_sink + partial, 0.0)
            return
    values = at(out, sequence, start, head, out_batch, out_token, out_head)
    gradients = at(grad_out, sequence, start, head, grad_batch, grad_token, grad_head)
    value = load_rows(values, first, out_token, limit, ROWS, 0, BLOCK_V, V, True).to(tl.float32)
    gradient = load_rows(gradients, first, grad_token, limit, ROWS, 0, BLOCK_V, V, True).to(
        tl.float32
    )
    product = tl.sum(value * gradient, 1)
    row = first + tl.arange(0, ROWS)
    offset = row * lse_token
    tl.store(
        at(delta, sequence, start, head, lse_batch, lse_token, lse_head) + offset,
        product,
        mask=row < stored,
    )
    if sink is not None:
        levels = at(lse, sequence, start, head, lse_batch, lse_token, lse_head)
        level = tl.load(levels + offset, mask=row < limit, other=float("inf"))
        level = tl.where(level == -float("inf"), float("inf"), level)
        share = tl.exp2((tl.load(sink + head).to(tl.float32) - level) * LOG2_E)
        tl.store(grad_sink + partial, -tl.sum(share * product, 0))


def delta(problem: AttentionProblem, out: tuple[int, int, int], has_sink: bool = False) -> Launch:
    """Launch (out, grad_out, lse, sink | None, lengths_q, starts_q, masked_q) -> delta, grad_sink | None.

    grad_sink is [b, h, tiles of the longest sequence]. `problem.out` are the grad_out strides, `out` the output's
    strides.
    """
    block = max(16, triton.next_power_of_2(problem.size_v))
    rows = max(16, 4096 // block)
    scalars = (problem.seqlen_q, *problem.lse, *out, *problem.out)
    programs, sequences = problem.query_tiles(rows)
    partial = (problem.batch, problem.heads, ceil_div(problem.seqlen_q, rows))
    grad_sink = Output(partial, "float32", begins=0.0 if sequences else None) if has_sink else None
    outputs = (Output(None, "float32"), grad_sink)
    grid = (programs, problem.heads, 1 if sequences else problem.batch)
    return Launch(
        row_products, grid, outputs, scalars, (problem.size_v, block, rows, sequences), warps=4
    )

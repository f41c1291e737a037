"""loss = mean(cross_entropy(hidden [M, K] @ weight [V, K].T + bias [V], target [M])), without storing [M, V] logits.

The forward pass processes the rows in chunks. For each chunk it computes the logits, the losses,
the logit gradient in place, and the chunk's part of every gradient. The backward pass multiplies
these gradients in place by the loss gradient, one number, unless that is 1. Losses per row have M
such numbers, which are unknown in the forward pass; the backward pass then recomputes the logits.

The weight gradient is one tensor with the weight dtype. Each product that accumulates into it rounds it once
more. The first K rows are computed by id blocks, with one rounding (`logits_by_ids`). With 8192 rows and 4096
features, eleven chunks remain to be accumulated. With `precise`, logits for the remaining rows are computed
twice, and each row group is accumulated at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...common.dispatch import requirements
from ...common.operation_settings import Labels
from ..primitives.cross_entropy import cross_entropy_rescaled
from ..primitives.gemm import Epilogue, gemm, plain
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from .cross_entropy import CrossEntropy, counted, is_needed_again, row_losses
from .head_gradients import HeadGradients, RowFacts, whole_tiles
from .logits_by_ids import LogitsByIds

_SHARE = 21  # 1/21 of the logits (4.8 %) are in memory at once


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    labels: Labels,
    mean: bool,
    precise: bool = False,
) -> Tensor:
    """Return the loss in float32: the mean [], or without `mean` the row losses [M].

    Args:
        hidden: Features [M, K].
        weight: Weight [V, K], with the dtype of hidden.
        bias: Bias [V] with the same dtype, or None.
        targets: Class indices int64 [M].
        labels: Ignored label, smoothing and class counts.
        mean: Return the mean over the rows whose label is not ignored.
        precise: Round the weight's gradient less often, but compute most logits twice.
    """
    if mean:
        return _Mean.apply(hidden, weight, bias, targets, labels, precise)
    return _Rows.apply(hidden, weight, bias, targets, labels)


def chunk_rows(rows: int) -> int:
    """Return the rows per chunk."""
    return whole_tiles(rows // _SHARE)


class _Mean(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, labels, precise):
        count = counted(targets, labels)
        gradients = HeadGradients.wanted(ctx.needs_input_grad, hidden, weight, bias)
        differentiated = any(ctx.needs_input_grad)
        total, factor = torch.zeros((), dtype=torch.float32, device=hidden.device), 1.0 / count
        done = 0
        # A compiler's graph writes every tensor through one base.
        how = (not torch.compiler.is_compiling(), precise)
        for rows, logits in _group_by_ids(gradients, hidden, weight, bias, *how):
            losses, statistics = logits.losses(targets[rows], labels)
            total += losses.sum()
            facts = RowFacts(targets[rows], statistics, factor, labels)
            logits.spend(facts, gradients.of(rows), begin=rows.start == 0)
            done = rows.stop
        for rows, logits in _chunks(done, hidden, weight, bias):
            losses, statistics = row_losses(logits, targets[rows], CrossEntropy(labels))
            total += losses.sum()
            if differentiated:
                facts = RowFacts(targets[rows], statistics, factor, labels)
                gradients.take_rows(rows, facts.gradient(logits, in_place=True), hidden, weight)
        ctx.save_for_backward(*gradients.results(bias))
        return total / count[0]

    @staticmethod
    @once_differentiable("fused_linear_cross_entropy")
    def backward(ctx, grad_loss):
        factor = grad_loss.to(torch.float32).view(1)
        scaled = _product if is_needed_again() else cross_entropy_rescaled
        return (
            *(None if grad is None else scaled(grad, factor) for grad in ctx.saved_tensors),
            None,
            None,
            None,
        )


def _product(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient * factor).to(gradient.dtype)


class _Rows(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, labels):
        parts = [
            row_losses(logits, targets[rows], CrossEntropy(labels))
            for rows, logits in _chunks(0, hidden, weight, bias)
        ]
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat([part[1] for part in parts]))
        ctx.labels = labels
        return torch.cat([part[0] for part in parts])

    @staticmethod
    @once_differentiable("fused_linear_cross_entropy")
    def backward(ctx, grad_loss):
        hidden, weight, bias, targets, statistics = ctx.saved_tensors
        facts = RowFacts(targets, statistics, grad_loss.to(torch.float32).contiguous(), ctx.labels)
        gradients = HeadGradients.wanted(ctx.needs_input_grad, hidden, weight, bias)
        done = 0
        # Chunks need fewer operations, which a compiler traces one by one.
        for rows, logits in _group_by_ids(
            gradients, hidden, weight, bias, False, not torch.compiler.is_compiling()
        ):
            logits.spend(facts.part(rows), gradients.of(rows), begin=rows.start == 0)
            done = rows.stop
        for rows, logits in _chunks(done, hidden, weight, bias):
            of_logits = facts.part(rows).gradient(logits, in_place=True)
            gradients.take_rows(rows, of_logits, hidden, weight)
        return *gradients.results(bias), None, None


def _group_by_ids(
    gradients: HeadGradients,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lend: bool,
    rest: bool,
) -> Iterator[tuple[slice, LogitsByIds]]:
    """Yield the first rows, in groups that accumulate into the weight's gradient once each.

    The caller processes the remaining rows in chunks. Without a weight gradient, nothing is yielded.

    Args:
        gradients: Gradients to be computed.
        hidden: Features [M, K].
        weight: Weight [V, K].
        bias: Bias [V], or None.
        lend: Store logits for as many rows as possible in the weight gradient's memory.
        rest: Also yield the rows after these, so that no row remains.
    """
    # The sum over id blocks for a row's gradient would depend on the number of rows, which determines the blocks.
    if gradients.weight is None or requirements.batch_invariant:
        return
    rows, features = hidden.shape
    room = rows * weight.shape[0] // _SHARE
    lent = 0
    if lend:
        most = rows if rows <= features else whole_tiles(features)
        lent = most if chunk_rows(rows) <= most <= features else 0
    if lent:
        head = (hidden[:lent], weight, bias)
        yield slice(0, lent), LogitsByIds.create_in_gradients(room, *head, gradients)
    if rest:
        yield from LogitsByIds.iterate_groups(room, slice(lent, rows), hidden, weight, bias)


def _chunks(
    start: int, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their logits [m, V] in hidden's dtype), chunk by chunk from row `start` on, in one buffer."""
    total = hidden.shape[0]
    if start == total:
        return
    most = min(chunk_rows(total), total - start)
    buffer = hidden.new_empty(most, weight.shape[0])
    for first in range(start, total, most):
        rows = slice(first, min(first + most, total))
        logits = buffer[: rows.stop - first]
        yield rows, gemm(plain(hidden[rows]), plain(weight), Epilogue(hidden.dtype, bias, logits))

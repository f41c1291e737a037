"""loss = mean(cross_entropy(hidden [M, K] @ weight [V, K].T + bias [V], target [M])), never holding [M, V] logits.

Rows go through in chunks: logits of a chunk, its losses, their gradient in place of the logits, and from it the chunk's
part of every gradient, all in the forward pass. The backward multiplies by the gradient of the loss, one number, in
place and only where it is not 1. A loss a row has M numbers to multiply by, unknown beforehand: its logits are made
again in the backward.

The weight's gradient is one tensor of its dtype, which products are added to, and each addition rounds it once more.
The first K rows begin it (`logits_by_ids`). Of 8192 rows and 4096 features eleven chunks are left to add; where it is
to be precise, their logits are made twice, and all of them are added at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import Function

from ...common.operation_settings import Labels
from ..primitives.cross_entropy import cross_entropy_rescaled
from ..primitives.gemm import Epilogue, gemm, plain
from ..runtime.double_backward import once_differentiable
from .cross_entropy import CrossEntropy, counted, is_needed_again, row_losses
from .head_gradients import HeadGradients, RowFacts, whole_tiles
from .logits_by_ids import LogitsByIds

_SHARE = 21  # memory for this part of the logits, 4.8 %


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    labels: Labels,
    mean: bool,
    precise: bool = False,
) -> Tensor:
    """float32 [] or, without mean, [M]; hidden, weight and bias of one dtype, targets int64 [M]."""
    if mean:
        return _Mean.apply(hidden, weight, bias, targets, labels, precise)  # pyright: ignore[reportReturnType]
    return _Rows.apply(hidden, weight, bias, targets, labels)  # pyright: ignore[reportReturnType]


def chunk_rows(rows: int) -> int:
    """How many rows go through together."""
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
        for rows, logits in _by_ids(gradients, hidden, weight, bias, *how):
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
    def backward(ctx, grad_loss):  # pyright: ignore[reportIncompatibleMethodOverride]
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
    def backward(ctx, grad_loss):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, statistics = ctx.saved_tensors
        facts = RowFacts(targets, statistics, grad_loss.to(torch.float32).contiguous(), ctx.labels)
        gradients = HeadGradients.wanted(ctx.needs_input_grad, hidden, weight, bias)
        done = 0
        # Chunks are fewer operations for a compiler, which writes down each.
        for rows, logits in _by_ids(
            gradients, hidden, weight, bias, False, not torch.compiler.is_compiling()
        ):
            logits.spend(facts.part(rows), gradients.of(rows), begin=rows.start == 0)
            done = rows.stop
        for rows, logits in _chunks(done, hidden, weight, bias):
            of_logits = facts.part(rows).gradient(logits, in_place=True)
            gradients.take_rows(rows, of_logits, hidden, weight)
        return *gradients.results(bias), None, None


def _by_ids(
    gradients: HeadGradients, hidden: Tensor, weight: Tensor, bias: Tensor | None, lend: bool, rest: bool
) -> Iterator[tuple[slice, LogitsByIds]]:
    """The first rows, in groups that add to the weight's gradient once each; the others are processed in chunks.

    lend   the memory of that gradient holds the logits of those rows that it can
    rest   no row is left
    Where no gradient of a weight is wanted there is nothing to add to, and nothing is gained.
    """
    if gradients.weight is None:
        return
    rows, features = hidden.shape
    room = rows * weight.shape[0] // _SHARE
    lent = 0
    if lend:
        most = rows if rows <= features else whole_tiles(features)
        lent = most if chunk_rows(rows) <= most <= features else 0
    if lent:
        head = (hidden[:lent], weight, bias)
        yield slice(0, lent), LogitsByIds.in_gradients(room, *head, gradients)
    if rest:
        yield from LogitsByIds.in_turn(room, slice(lent, rows), hidden, weight, bias)


def _chunks(
    start: int, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [m, V] in hidden's dtype), chunk after chunk from a row on, in one buffer."""
    total = hidden.shape[0]
    if start == total:
        return
    most = min(chunk_rows(total), total - start)
    buffer = hidden.new_empty(most, weight.shape[0])
    for first in range(start, total, most):
        rows = slice(first, min(first + most, total))
        logits = buffer[: rows.stop - first]
        yield rows, gemm(plain(hidden[rows]), plain(weight), Epilogue(hidden.dtype, bias, logits))

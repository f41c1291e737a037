"""loss [M] = ln(sum(exp(x [M, V]))) - x[target], or its mean, differentiable in x, which may be sharded over ranks.

The forward pass reads the logits once and saves two numbers per row. The backward pass computes the
gradient from the logits. In place, a training step holds one tensor [M, V] instead of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.operation_settings import Labels
from ..constants import dist_group_type
from ..distributed.collectives import gather_along_first_dim
from ..primitives.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_losses,
    cross_entropy_statistics,
)
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable


class CrossEntropy(NamedTuple):
    """Settings for a loss on logits.

    Args:
        labels: Vocabulary, smoothing and the ignored target.
        group: Ranks that hold the other columns; None for logits over the whole vocabulary.
        mean: Return the mean over the rows that count, instead of one loss per row.
        overwrites: Write the gradient into the memory of the logits, once per loss.
    """

    labels: Labels
    group: dist_group_type | None = None
    mean: bool = False
    overwrites: bool = False


def cross_entropy(x: Tensor, targets: Tensor, how: CrossEntropy) -> Tensor:
    """Return the losses float32 [M], or their mean [], for x [M, V] and targets int64 [M], both contiguous."""
    if how.overwrites and (torch.compiler.is_compiling() or is_part(x)):
        how = how._replace(overwrites=False)
    return _CrossEntropy.apply(x, targets, how)


def is_part(x: Tensor) -> bool:
    """Whether x is a view of a larger tensor, as where logits are split into chunks.

    Autograd counts versions of the whole tensor, so that writing one chunk would invalidate the others.
    """
    return x._base is not None and x._base.numel() > x.numel()


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, targets, how):
        loss, statistics = row_losses(x, targets, how)
        count = counted(targets, how.labels) if how.mean else None
        ctx.save_for_backward(x, targets, statistics, count)
        ctx.how = how
        return loss if count is None else loss.sum() / count[0]

    @staticmethod
    @once_differentiable("parallel_cross_entropy")
    def backward(ctx, grad_loss):
        x, targets, statistics, count = ctx.saved_tensors
        factor = grad_loss.to(torch.float32)
        factor = factor.contiguous() if count is None else factor / count
        in_place = ctx.how.overwrites
        with torch.no_grad():
            plain = x.detach()
            grad_x = cross_entropy_gradient(
                plain, targets, statistics, factor, ctx.how.labels, in_place
            )
        if in_place:
            # A second backward pass, or one through another operation that saved the logits, then raises RuntimeError.
            increment_version(x)
        return grad_x, None, None


def row_losses(x: Tensor, targets: Tensor, how: CrossEntropy) -> tuple[Tensor, Tensor]:
    """Return losses [M] and statistics [M, 2], equal on all ranks in the group that the columns are sharded over."""
    partials = cross_entropy_statistics(x, targets, how.labels)
    if how.group is not None:
        partials, _ = gather_along_first_dim(partials, how.group)
    return cross_entropy_losses(partials, targets, how.labels)


def counted(targets: Tensor, labels: Labels) -> Tensor:
    """Return float32 [1], the count of rows whose target is not ignored, at least 1."""
    return (targets != labels.ignored).sum(dtype=torch.float32).clamp_(min=1.0).view(1)


def is_needed_again() -> bool:
    """Return whether a later pass may read the saved tensors: a retained graph, a compiled one, a call by hand."""
    engine: Any = torch._C
    if torch.compiler.is_compiling() or engine._current_graph_task_id() == -1:
        return True
    return engine._autograd._get_current_graph_task_keep_graph()

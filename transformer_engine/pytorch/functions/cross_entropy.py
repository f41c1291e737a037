"""loss [M] = ln(sum(exp(x [M, V]))) - x[target], or its mean, differentiable in x, which may be cut over ranks.

The forward pass reads the logits once and leaves two numbers a row; the backward pass makes the gradient from the
logits, by default in their place: a training step holds one tensor of [M, V] and never two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from ...common.labels import Labels
from ..constants import dist_group_type
from ..distributed.collectives import gather_along_first_dim
from ..primitives.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_losses,
    cross_entropy_statistics,
)
from ..runtime.double_backward import once_differentiable


class CrossEntropy(NamedTuple):
    """How a loss is made of logits.

    group        ranks that hold the other columns; None: there are none
    mean         one number, the mean over the rows whose target counts; else a loss a row
    keeps_logits   the gradient gets memory of its own
    """

    labels: Labels
    group: dist_group_type | None = None
    mean: bool = False
    keeps_logits: bool = False


def cross_entropy(x: Tensor, targets: Tensor, how: CrossEntropy) -> Tensor:
    """float32 [M], or [] for the mean, of x [M, V] contiguous and targets int64 [M] contiguous."""
    return _CrossEntropy.apply(x, targets, how)  # pyright: ignore[reportReturnType]


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
    def backward(ctx, grad_loss):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, targets, statistics, count = ctx.saved_tensors
        factor = grad_loss.to(torch.float32)
        factor = factor.contiguous() if count is None else factor / count
        in_place = not (ctx.how.keeps_logits or is_needed_again())
        with torch.no_grad():
            plain = x.detach()
            grad_x = cross_entropy_gradient(plain, targets, statistics, factor, ctx.how.labels, in_place)
        if in_place:
            increment_version(
                x
            )  # whoever else saved the logits for a backward of theirs is told so by autograd
        return grad_x, None, None


def row_losses(x: Tensor, targets: Tensor, how: CrossEntropy) -> tuple[Tensor, Tensor]:
    """(loss [M], statistics [M, 2]) of rows whose columns may be cut over the group, which all its ranks get."""
    partials = cross_entropy_statistics(x, targets, how.labels)
    if how.group is not None:
        partials, _ = gather_along_first_dim(partials, how.group)
    return cross_entropy_losses(partials, targets, how.labels)  # pyright: ignore[reportArgumentType]


def counted(targets: Tensor, labels: Labels) -> Tensor:
    """float32 [1]: how many rows count, at least one."""
    return (targets != labels.ignored).sum(dtype=torch.float32).clamp_(min=1.0).view(1)


def is_needed_again() -> bool:
    """May a later pass read what this backward was given: a kept graph, one that is compiled, a call by hand?"""
    engine: Any = torch._C
    if torch.compiler.is_compiling() or engine._current_graph_task_id() == -1:
        return True
    return engine._autograd._get_current_graph_task_keep_graph()

"""Sequences that ranks share: y [n * M, ...] = all-gather of x [M, ...] over n ranks, differentiable."""

from __future__ import annotations

from torch import Tensor

from ..constants import dist_group_type
from ..distributed.collectives import gather_along_first_dim, reduce_scatter_along_first_dim
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable


def gather_sequence(x: Tensor, group: dist_group_type | None) -> Tensor:
    """Gather x [M, ...] from all ranks of the group in rank order; the gradients of all ranks are summed."""
    return _GatherSequence.apply(x, group)  # pyright: ignore[reportReturnType]


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_along_first_dim(x, group)[0]

    @staticmethod
    @once_differentiable("the gathering of a sequence over ranks")
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return reduce_scatter_along_first_dim(dy, ctx.group)[0], None

"""q [.., h, d], k [.., g, d], v [.., g, d] = split(x [.., (h + 2 g) d]): one node of the graph, one copy back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.autograd import applier
from ..tensor.float8_tensor import Float8Tensor, Float8TensorStorage


def split_heads(
    x: Tensor, queries: int, groups: int, size: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a projection, as views of it where the order allows; of a Float8Tensor, its codes in three tensors.

    interleaved   group by group (the group's queries, its key, its value), else all queries, all keys, all values
    """
    if (
        type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
    ):
        return parts_of(x, queries, groups, size, interleaved)
    return _apply(x, queries, groups, size, interleaved)


def parts_of(
    x: Tensor, queries: int, groups: int, size: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same views, of which autograd sees nothing but views."""
    axis = -2 if interleaved else -3  # that of a group's heads
    each, leading = queries // groups, x.shape[:-1]
    parts = x.reshape(*leading, *((groups, each + 2) if interleaved else (each + 2, groups)), size)
    if each == 1:
        return parts.select(axis, 0), parts.select(axis, 1), parts.select(axis, 2)
    q = parts.narrow(axis, 0, each).reshape(*leading, queries, size)
    return q, parts.select(axis, each), parts.select(axis, each + 1)


def joined(dq: Tensor, dk: Tensor, dv: Tensor, interleaved: bool) -> Tensor:
    """dx [.., (h + 2 g) d] of the gradients of the three."""
    axis = -2 if interleaved else -3
    groups, size = dk.shape[-2:]
    each = dq.shape[-2] // groups
    inner = (groups, each) if interleaved else (each, groups)
    dq = dq.reshape(*dk.shape[:-2], *inner, size)
    return torch.cat((dq, dk.unsqueeze(axis), dv.unsqueeze(axis)), dim=axis).flatten(-3)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, queries, groups, size, interleaved):
        ctx.interleaved = interleaved
        if isinstance(x, Float8Tensor):
            if x._data is None:
                raise ValueError("the projection's codes are column-wise alone; keep rowwise_usage=True")
            # Dense, as kernels of FP8 attention read them; a copy moves one byte a value.
            codes = (part.contiguous() for part in parts_of(x._data, queries, groups, size, interleaved))
            return tuple(
                Float8Tensor.from_storage(Float8TensorStorage(part, x._scale_inv, **x.constants()))
                for part in codes
            )
        return parts_of(x, queries, groups, size, interleaved)

    @staticmethod
    def backward(ctx, dq, dk, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        return joined(dq, dk, dv, ctx.interleaved), None, None, None, None


_apply = applier(_SplitHeads)

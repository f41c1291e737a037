"""q [.., h, d], k [.., g, d], v [.., g, d] = split(x [.., (h + 2 g) d]): one node of the graph, one copy back."""

from __future__ import annotations

import torch
from torch import Tensor


def split_heads(
    x: Tensor, queries: int, groups: int, size: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a projection, as views of it where the order allows.

    interleaved   group by group (the group's queries, its key, its value), else all queries, all keys, all values
    """
    return _SplitHeads.apply(x, queries, groups, size, interleaved)  # pyright: ignore[reportReturnType]


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, queries, groups, size, interleaved):
        each = queries // groups
        leading = x.shape[:-1]
        ctx.each, ctx.groups, ctx.size, ctx.axis = each, groups, size, -2 if interleaved else -3
        parts = x.reshape(*leading, *((groups, each + 2) if interleaved else (each + 2, groups)), size)
        q = parts.narrow(ctx.axis, 0, each).reshape(*leading, queries, size)
        return q, parts.select(ctx.axis, each), parts.select(ctx.axis, each + 1)

    @staticmethod
    def backward(ctx, dq, dk, dv):  # pyright: ignore[reportIncompatibleMethodOverride]
        leading = dk.shape[:-2]
        inner = (ctx.groups, ctx.each) if ctx.axis == -2 else (ctx.each, ctx.groups)
        dq = dq.reshape(*leading, *inner, ctx.size)
        dx = torch.cat((dq, dk.unsqueeze(ctx.axis), dv.unsqueeze(ctx.axis)), dim=ctx.axis)
        return dx.view(*leading, -1), None, None, None, None

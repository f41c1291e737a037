"""Views of a projection whose gradients are joined by one node of the graph: by heads, or along any dimension.

split_heads: q [.., h, d], k [.., g, d], v [.., g, d] of x [.., (h + 2 g) d]. SplitAlongDim: x_0 .. x_n of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import applier
from ..runtime.double_backward import is_recorded
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


class SplitAlongDim(torch.autograd.Function):
    """apply(x, dim, size or sizes, squeeze=False) -> the parts, without the dimension where it is squeezed.

    Gradients are joined without a copy where they are adjacent in memory.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, mixed: Tensor, dim: int, sizes: int | Sequence[int], squeeze: bool = False
    ) -> tuple[Tensor, ...]:
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = torch.split(mixed, sizes if isinstance(sizes, int) else list(sizes), dim=dim)
        return tuple(part.squeeze(dim) for part in parts) if squeeze else tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = [grad.unsqueeze(ctx.dim) for grad in grads] if ctx.squeeze else list(grads)
        joined = None if is_recorded() else _adjacent(whole, ctx.dim)
        return (torch.cat(whole, dim=ctx.dim) if joined is None else joined), None, None, None


def _adjacent(parts: list[Tensor], dim: int) -> Tensor | None:
    """The tensor whose consecutive parts along a dimension these are, if they are views into one memory."""
    first = parts[0]
    if type(first) is not Tensor or torch.compiler.is_compiling():
        return None
    offset, strides, memory = first.storage_offset(), first.stride(), first.untyped_storage().data_ptr()
    for part in parts:
        if (
            type(part) is not Tensor
            or part.stride() != strides
            or part.storage_offset() != offset
            or part.untyped_storage().data_ptr() != memory
        ):
            return None
        offset += part.shape[dim] * strides[dim]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(shape, strides, first.storage_offset())

"""Views of a projection whose gradients are joined by one graph node: by heads, or along any dimension.

`split_heads` splits x [.., (h + 2 g) d] into q [.., h, d], k [.., g, d] and v [.., g, d]; `SplitAlongDim` splits x
into x_0 .. x_n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Function
from ..runtime.double_backward import is_recorded
from ..tensor.float8_tensor import Float8Tensor, Float8TensorStorage


def split_heads(
    x: Tensor, queries: int, groups: int, size: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v from a projection, as views where the layout allows it.

    The parts of a Float8Tensor are three tensors with its codes.

    Args:
        x: Projection [.., (queries + 2 groups) size].
        queries: Query head count.
        groups: Key and value head count.
        size: Features per head.
        interleaved: Whether the features are ordered by group (the group's queries, its key, its value). Otherwise all
            queries come first, then all keys, then all values.
    """
    if (
        type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch.compiler.is_compiling()
    ):
        return split_views(x, queries, groups, size, interleaved)
    return _SplitHeads.apply(x, queries, groups, size, interleaved)


def split_views(
    x: Tensor, queries: int, groups: int, size: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same parts as plain views, without a joint node for their gradients."""
    axis = -2 if interleaved else -3  # head axis within a group
    each, leading = queries // groups, x.shape[:-1]
    parts = x.reshape(*leading, *((groups, each + 2) if interleaved else (each + 2, groups)), size)
    if each == 1:
        return parts.select(axis, 0), parts.select(axis, 1), parts.select(axis, 2)
    q = parts.narrow(axis, 0, each).reshape(*leading, queries, size)
    return q, parts.select(axis, each), parts.select(axis, each + 1)


def splits_into_views(queries: int, groups: int, interleaved: bool) -> bool:
    """Whether `split_views` copies nothing: with several interleaved queries per group, it copies the queries."""
    return queries == groups or groups == 1 or not interleaved


def join_gradients(dq: Tensor, dk: Tensor, dv: Tensor, interleaved: bool) -> Tensor:
    """Return dx [.., (h + 2 g) d] from the q, k and v gradients."""
    axis = -2 if interleaved else -3
    groups, size = dk.shape[-2:]
    each = dq.shape[-2] // groups
    inner = (groups, each) if interleaved else (each, groups)
    dq = dq.reshape(*dk.shape[:-2], *inner, size)
    return torch.cat((dq, dk.unsqueeze(axis), dv.unsqueeze(axis)), dim=axis).flatten(-3)


class _SplitHeads(Function):
    OPERATION = "a layer with heads"

    @staticmethod
    def forward(ctx, x, queries, groups, size, interleaved):
        ctx.interleaved = interleaved
        if isinstance(x, Float8Tensor):
            if x._data is None:
                raise ValueError(
                    "the projection's codes are column-wise alone; keep rowwise_usage=True"
                )
            # Contiguous, as FP8 attention kernels require; a copy moves one byte per value.
            codes = (
                part.contiguous()
                for part in split_views(x._data, queries, groups, size, interleaved)
            )
            return tuple(
                Float8Tensor.from_storage(Float8TensorStorage(part, x._scale_inv, **x.constants()))
                for part in codes
            )
        return split_views(x, queries, groups, size, interleaved)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return join_gradients(dq, dk, dv, ctx.interleaved), None, None, None, None


class SplitAlongDim(Function):
    """apply(x, dim, size or sizes, squeeze=False): split a tensor along a dimension, which is removed with `squeeze`.

    Gradients are joined without a copy if they are adjacent in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, dim: int, sizes: int | Sequence[int], squeeze: bool = False
    ) -> tuple[Tensor, ...]:
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = torch.split(mixed, sizes if isinstance(sizes, int) else list(sizes), dim=dim)
        return tuple(part.squeeze(dim) for part in parts) if squeeze else tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = [grad.unsqueeze(ctx.dim) for grad in grads] if ctx.squeeze else list(grads)
        joined = None if is_recorded() else _adjacent(parts, ctx.dim)
        return (torch.cat(parts, dim=ctx.dim) if joined is None else joined), None, None, None


def _adjacent(parts: list[Tensor], dim: int) -> Tensor | None:
    """Return the tensor that is split into these parts if they are consecutive views of one memory; otherwise None."""
    first = parts[0]
    if type(first) is not Tensor or torch.compiler.is_compiling():
        return None
    offset, strides, memory = (
        first.storage_offset(),
        first.stride(),
        first.untyped_storage().data_ptr(),
    )
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

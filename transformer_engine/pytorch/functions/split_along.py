"""x_0 .. x_n = split(x, sizes, dim): views; their gradients are joined without a copy where they lie together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.double_backward import is_recorded


class SplitAlongDim(torch.autograd.Function):
    """apply(x, dim, size or sizes, squeeze=False) -> the parts, without the dimension where it is squeezed."""

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

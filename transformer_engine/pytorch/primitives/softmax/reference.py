"""y = softmax(scale * x) and dx = scale * y * (dy - sum(dy * y)) in float32 torch operations, any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, depends_on_gpu
from ...runtime.row_functions import sum_rows
from ...runtime.tracing import cast_result

# Which of k keys query i of q sees: top_left j <= i; bottom_right j <= i + k - q.
CAUSAL = ("top_left", "bottom_right")


class SoftmaxRequest(NamedTuple):
    """One call on x [.., q, k]; mask: shape and strides of the mask that hides keys, forward only."""

    operation: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    causal: str | None
    scale: float = 1.0
    mask: tuple[torch.Size, tuple[int, ...]] | None = None


def causal_shift(causal: str | None, shape: torch.Size) -> int | None:
    """Return how many keys beyond its own index a query sees; None without a causal mask."""
    if causal is None:
        return None
    return 0 if causal == "top_left" else shape[-1] - shape[-2]


def bind(request: SoftmaxRequest) -> Callable[..., Tensor]:
    """Return the operation as a callable: (x, mask) -> y, or (dy, y) -> dx."""
    scale, causal = request.scale, request.causal
    if request.operation == "forward":
        return lambda x, mask: forward(x, scale, mask, causal)
    return lambda dy, y: backward(dy, y, scale, causal)


def forward(x: Tensor, scale: float, mask: Tensor | None, causal: str | None) -> Tensor:
    """y [.., q, k]; zeros for a query that sees no key."""
    score = x.to(torch.float32) * scale
    if mask is not None:
        score = score.masked_fill(mask != 0, -torch.inf)
    if causal is not None:
        score = score.masked_fill(_hidden(x, causal), -torch.inf)
    if x.shape[-1] == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    row_max = score.amax(-1, keepdim=True)
    weight = torch.exp(score - torch.where(row_max == -torch.inf, 0.0, row_max))
    total = sum_rows(weight)[..., None]
    return cast_result(torch.where(total == 0.0, 0.0, weight / total), x.dtype)


def backward(dy: Tensor, y: Tensor, scale: float, causal: str | None) -> Tensor:
    """Return dx [.., q, k]."""
    weight, gradient = y.to(torch.float32), dy.to(torch.float32)
    if causal is not None:
        gradient = gradient.masked_fill(_hidden(y, causal), 0.0)
    mean = sum_rows(weight * gradient)[..., None]
    return (scale * (weight * (gradient - mean))).to(y.dtype)


def _hidden(x: Tensor, causal: str) -> Tensor:
    """Return whether each key [q, k] is hidden from the query."""
    query = torch.arange(x.shape[-2], device=x.device)
    key = torch.arange(x.shape[-1], device=x.device)
    shift = causal_shift(causal, x.shape)
    assert shift is not None
    return key[None, :] > query[:, None] + shift


BACKEND: Backend[SoftmaxRequest] = Backend("reference", bind=bind, batch_dependent=depends_on_gpu)

"""The masked softmax on GPUs: the scores read once and the probabilities written once, up to 16384 keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, run, unsupported_elementwise
from .reference import SoftmaxRequest, causal_shift

_LIMIT = 1 << 31  # rows are numbered in 32 bits


def unsupported_reason(request: SoftmaxRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.shape[:-1].numel() >= _LIMIT:
        return f"{list(request.shape)} has {_LIMIT} rows or more"
    return unsupported_elementwise(request.device, request.dtype)


def bind(request: SoftmaxRequest) -> Callable[..., Tensor]:
    """Return the operation as a callable: (x, mask) -> y, or (dy, y) -> dx, contiguous [.., q, k]."""
    shape = request.shape
    if shape.numel() == 0:
        return lambda x, _: x.new_empty(shape)
    return _forward(request) if request.operation == "forward" else _backward(request)


def _forward(request: SoftmaxRequest) -> Callable[[Tensor, Tensor | None], Tensor]:
    from ....common.kernels import softmax

    shape, strides = request.shape, (0, 0, 0, 0)
    if request.mask is not None:
        lies = torch.empty_strided(*request.mask, dtype=torch.uint8, device="meta")
        batch, head, query, key = _hidden(lies, shape).stride()
        strides = (batch, head, query, key)
    shift = causal_shift(request.causal, shape)
    launch = softmax.forward(
        _four(shape), strides, DTYPE_NAMES[request.dtype], request.scale, shift
    )

    def forward(x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = None if mask is None else _hidden(mask, shape)
        return run(launch, (x.contiguous(), hidden))[0].view(shape)

    return forward


def _backward(request: SoftmaxRequest) -> Callable[[Tensor, Tensor], Tensor]:
    from ....common.kernels import softmax

    shape, shift = request.shape, causal_shift(request.causal, request.shape)
    launch = softmax.backward(_four(shape), DTYPE_NAMES[request.dtype], request.scale, shift)
    return lambda dy, y: run(launch, (dy.contiguous(), y.contiguous()))[0].view(shape)


def _four(shape: torch.Size) -> tuple[int, int, int, int]:
    """Return the shape as [batch, heads, queries, keys]."""
    if len(shape) == 4:
        return (shape[0], shape[1], shape[2], shape[3])
    if len(shape) == 2:
        return (1, 1, shape[0], shape[1])
    return (shape[:-3].numel(), shape[-3], shape[-2], shape[-1])


def _hidden(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask as uint8 [batch, heads, queries, keys], expanded by zero strides."""
    if mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    mask = mask.expand(shape)
    return mask if len(shape) == 4 else mask.reshape(_four(shape))


BACKEND: Backend[SoftmaxRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)

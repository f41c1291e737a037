"""The masked softmax on GPUs: the scores read once and the probabilities written once, up to 16384 keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import DTYPE_NAMES, refuses_elementwise, run, traceable
from .request import SoftmaxRequest, shift_of

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch

_LIMIT = 1 << 31  # rows are numbered in 32 bits


def _forward(x: Tensor, scale: float, mask: Tensor | None, causal: str | None) -> Tensor:
    """y [.., q, k], contiguous."""
    if x.numel() == 0:
        return _empty(x, scale, mask, causal)
    shape = _four(x.shape)
    hidden = None if mask is None else _hidden(mask, x.shape)
    strides = (0, 0, 0, 0) if hidden is None else hidden.stride()
    launch = _forward_launch(shape, strides, x.dtype, scale, shift_of(causal, x.shape))
    return run(launch, (x.contiguous(), hidden))[0].view(x.shape)


def _backward(dy: Tensor, y: Tensor, scale: float, causal: str | None) -> Tensor:
    """dx [.., q, k], contiguous."""
    if y.numel() == 0:
        return _empty_gradient(dy, y, scale, causal)
    launch = _backward_launch(_four(y.shape), y.dtype, scale, shift_of(causal, y.shape))
    return run(launch, (dy.contiguous(), y.contiguous()))[0].view(y.shape)


def _four(shape: torch.Size) -> tuple[int, int, int, int]:
    """[batch, heads, queries, keys]"""
    if len(shape) == 4:
        return (shape[0], shape[1], shape[2], shape[3])
    if len(shape) == 2:
        return (1, 1, shape[0], shape[1])
    return (shape[:-3].numel(), shape[-3], shape[-2], shape[-1])


def _hidden(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as uint8 [batch, heads, queries, keys], repeated by strides of 0."""
    if mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    mask = mask.expand(shape)
    return mask if len(shape) == 4 else mask.reshape(_four(shape))


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    shape: tuple[int, int, int, int],
    mask_strides: tuple[int, int, int, int],
    dtype: torch.dtype,
    scale: float,
    shift: int | None,
) -> Launch:
    from ....common.kernels import softmax  # it imports triton

    return softmax.forward(shape, mask_strides, DTYPE_NAMES[dtype], scale, shift)


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    shape: tuple[int, int, int, int], dtype: torch.dtype, scale: float, shift: int | None
) -> Launch:
    from ....common.kernels import softmax  # it imports triton

    return softmax.backward(shape, DTYPE_NAMES[dtype], scale, shift)


def _empty(x: Tensor, scale: float, mask: Tensor | None, causal: str | None) -> Tensor:
    return x.new_empty(x.shape)


def _empty_gradient(dy: Tensor, y: Tensor, scale: float, causal: str | None) -> Tensor:
    return y.new_empty(y.shape)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "forward": traceable(
        "scaled_softmax_forward(Tensor x, float scale, Tensor? mask, str? causal) -> Tensor", _forward, _empty
    ),
    "backward": traceable(
        "scaled_softmax_backward(Tensor dy, Tensor y, float scale, str? causal) -> Tensor",
        _backward,
        _empty_gradient,
    ),
}


def _operation(name: str) -> Callable[..., Tensor]:
    return OPERATIONS[name]


def refuses(request: SoftmaxRequest) -> str | None:
    if request.shape[:-1].numel() >= _LIMIT:
        return f"{list(request.shape)} has {_LIMIT} rows or more"
    return refuses_elementwise(request.device, request.dtype)


BACKEND: Backend[SoftmaxRequest] = Backend("triton", _operation, refuses)

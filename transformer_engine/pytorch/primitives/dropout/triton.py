"""Dropout on GPUs: x read once, y and one bit an element written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..launching import DTYPE_NAMES, refuses_elementwise, run, traceable
from .request import DropoutRequest, factor_of, threshold_of

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch

_LIMIT = 1 << 35  # eight elements share a 32-bit counter


def _forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """(y like x, mask uint8 [ceil(numel / 8)])"""
    if x.numel() == 0:
        return _empty(x, bias, residual, seed, p)
    launch = _forward_launch(x.numel(), x.shape[-1] if x.dim() else 1, x.dtype, p, True)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    mask, y = run(launch, (x.contiguous(), bias, residual, seed))
    return y.view(x.shape), mask


def _bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """y like x"""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    launch = _forward_launch(x.numel(), x.shape[-1], x.dtype, 0.0, False)
    return run(launch, (x.contiguous(), bias.contiguous(), residual.contiguous(), None))[1].view(x.shape)


def _backward(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    """dx, like dy"""
    if dy.numel() == 0:
        return dy.new_empty(dy.shape)
    launch = _backward_launch(dy.numel(), dy.dtype, p)
    return run(launch, (dy.contiguous(), mask.contiguous()))[0].view(dy.shape)


@functools.lru_cache(maxsize=1024)
def _forward_launch(size: int, width: int, dtype: torch.dtype, p: float, drops: bool) -> Launch:
    from ....common.kernels import dropout  # it imports triton

    return dropout.forward(size, width, DTYPE_NAMES[dtype], threshold_of(p), factor_of(p), drops=drops)


@functools.lru_cache(maxsize=1024)
def _backward_launch(size: int, dtype: torch.dtype, p: float) -> Launch:
    from ....common.kernels import dropout  # it imports triton

    return dropout.backward(size, DTYPE_NAMES[dtype], factor_of(p))


def _empty(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _empty_sum(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _empty_gradient(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    return dy.new_empty(dy.shape)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "forward": traceable(
        "dropout_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor seed, float p) -> (Tensor, Tensor)",
        _forward,
        _empty,
    ),
    "bias_add": traceable(
        "bias_add(Tensor x, Tensor bias, Tensor residual) -> Tensor", _bias_add, _empty_sum
    ),
    "backward": traceable(
        "dropout_backward(Tensor dy, Tensor mask, float p) -> Tensor", _backward, _empty_gradient
    ),
}


def _operation(name: str) -> Callable[..., Any]:
    return OPERATIONS[name]


def refuses(request: DropoutRequest) -> str | None:
    if request.size >= _LIMIT:
        return f"{request.size} elements, it numbers fewer than {_LIMIT}"
    return refuses_elementwise(request.device, request.dtype)


BACKEND: Backend[DropoutRequest] = Backend("triton", _operation, refuses)

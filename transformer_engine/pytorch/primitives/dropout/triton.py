"""Dropout on GPUs: x read once, y and one bit an element written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, refuses_elementwise, run
from .reference import DropoutRequest, empty_dropout, factor_of, threshold_of

_LIMIT = 1 << 35  # eight elements share a 32-bit counter


def unsupported_reason(request: DropoutRequest) -> str | None:
    size = request.shape.numel()
    if size >= _LIMIT:
        return f"{size} elements, it numbers fewer than {_LIMIT}"
    return refuses_elementwise(request.device, request.dtype)


def bind(request: DropoutRequest) -> Callable[..., Any]:
    """What `reference.bind` answers, on the same tensors."""
    if request.operation == "backward":
        return _backward(request)
    return _forward(request) if request.operation == "forward" else _bias_add(request)


def _forward(request: DropoutRequest) -> Callable[..., tuple[Tensor, Tensor]]:
    shape = request.shape
    if shape.numel() == 0:
        return empty_dropout
    from ....common.kernels import dropout  # it imports triton

    dropped = (threshold_of(request.p), factor_of(request.p))
    width = shape[-1] if shape else 1
    launch = dropout.forward(shape.numel(), width, DTYPE_NAMES[request.dtype], *dropped, drops=True)

    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        bias = None if bias is None else bias.contiguous()
        residual = None if residual is None else residual.contiguous()
        mask, y = run(launch, (x.contiguous(), bias, residual, seed))
        return y.view(shape), mask

    return forward


def _bias_add(request: DropoutRequest) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    shape = request.shape
    if shape.numel() == 0:
        return lambda x, bias, residual: x.new_empty(shape)
    from ....common.kernels import dropout  # it imports triton

    kept = (threshold_of(0.0), factor_of(0.0))
    launch = dropout.forward(shape.numel(), shape[-1], DTYPE_NAMES[request.dtype], *kept, drops=False)

    def bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return run(launch, (x.contiguous(), bias.contiguous(), residual.contiguous(), None))[1].view(shape)

    return bias_add


def _backward(request: DropoutRequest) -> Callable[[Tensor, Tensor], Tensor]:
    shape = request.shape
    if shape.numel() == 0:
        return lambda dy, mask: dy.new_empty(shape)
    from ....common.kernels import dropout  # it imports triton

    launch = dropout.backward(shape.numel(), DTYPE_NAMES[request.dtype], factor_of(request.p))
    return lambda dy, mask: run(launch, (dy.contiguous(), mask.contiguous()))[0].view(shape)


BACKEND: Backend[DropoutRequest] = Backend("triton", refuses=unsupported_reason, bind=bind, opaque=True)

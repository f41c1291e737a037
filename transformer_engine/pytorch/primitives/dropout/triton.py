"""Dropout on GPUs: x read once, y and one bit per element written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.launching import DTYPE_NAMES, run, unsupported_elementwise
from .reference import DropoutRequest, empty_dropout, keep_factor, keep_threshold

_LIMIT = 1 << 35  # eight elements share a 32-bit counter


def unsupported_reason(request: DropoutRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    size = request.shape.numel()
    if size >= _LIMIT:
        return f"{size} elements; it numbers fewer than {_LIMIT}"
    return unsupported_elementwise(request.device, request.dtype)


def bind(request: DropoutRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    shape, operation, p = request.shape, request.operation, request.p
    if shape.numel() == 0:
        if operation == "forward":
            return empty_dropout
        return lambda x, *_: x.new_empty(shape)
    from ....common.kernels import dropout

    size, dtype = shape.numel(), DTYPE_NAMES[request.dtype]
    if operation == "backward":
        backward = dropout.backward(size, dtype, keep_factor(p))
        return lambda dy, mask: run(backward, (dy.contiguous(), mask.contiguous()))[0].view(shape)
    width = shape[-1] if shape else 1
    if operation == "bias_add":
        add = dropout.forward(
            size, width, dtype, keep_threshold(0.0), keep_factor(0.0), drops=False
        )
        return lambda x, bias, residual: run(
            add, (x.contiguous(), bias.contiguous(), residual.contiguous(), None)
        )[1].view(shape)
    launch = dropout.forward(size, width, dtype, keep_threshold(p), keep_factor(p), drops=True)

    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor
    ) -> tuple[Tensor, Tensor]:
        bias = None if bias is None else bias.contiguous()
        residual = None if residual is None else residual.contiguous()
        mask, y = run(launch, (x.contiguous(), bias, residual, seed))
        return y.view(shape), mask

    return forward


BACKEND: Backend[DropoutRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)

"""The activations on GPUs: x and dy read once, y or dx written once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..column_sums import column_sums
from ..launching import DTYPE_NAMES, refuses_elementwise, rows_dense, run, traceable
from ..quantize import Cast, Quantized, quantize_as
from . import quantized
from .request import ACTIVATIONS, ActivationParams, ActivationRequest

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch


def activation_forward(
    name: str, x: Tensor, params: ActivationParams, cast: Cast | None = None
) -> Tensor | Quantized:
    """y = f(x) [...], or for gated units y [..., F] = f(x[..., :F]) * x[..., F:]; or its codes."""
    if cast is not None and quantized.fuses(x, ACTIVATIONS[name].gated, cast):
        return quantized.forward(name, x, params, cast)
    y = _traceable_forward(name, x, params.limit, params.alpha, params.offset)
    return y if cast is None else quantize_as(y, cast)


def activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    params: ActivationParams,
    cast: Cast | None = None,
    dbias: torch.dtype | None = None,
) -> Tensor | tuple[Quantized, Tensor | None]:
    """dx, shaped and typed like x; with a cast (its codes, the sum over its rows)."""
    if cast is not None and quantized.fuses_backward(name, x, cast, dbias is not None):
        return quantized.backward(name, dy, x, params, cast, dbias)
    dx = _traceable_backward(name, dy, x, params.limit, params.alpha, params.offset)
    if cast is None:
        return dx
    sums = None if dbias is None else column_sums(dx, dbias)
    return quantize_as(dx, cast), sums


def _forward(name: str, x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    if x.numel() == 0:
        return _empty_output(name, x, limit, alpha, offset)
    gated = ACTIVATIONS[name].gated
    matrix = _matrix(x)
    launch = _forward_launch(name, gated, matrix.shape, matrix.stride(0), x.dtype, (limit, alpha, offset))
    y = run(launch, (matrix,))[0]
    return y.view(*x.shape[:-1], y.shape[1]) if x.dim() else y.view(())


def _backward(name: str, dy: Tensor, x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    gated = ACTIVATIONS[name].gated
    matrix, gradient = _matrix(x), _matrix(dy)
    launch = _backward_launch(
        name,
        gated,
        matrix.shape,
        (gradient.stride(0), matrix.stride(0)),
        x.dtype,
        (limit, alpha, offset),
    )
    return run(launch, (gradient, matrix))[0].view(x.shape)


def _matrix(x: Tensor) -> Tensor:
    """x as [rows, width], its columns next to each other; a copy only where no view has that form."""
    return rows_dense(x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1))


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    name: str,
    gated: bool,
    shape: torch.Size,
    x_stride: int,
    dtype: torch.dtype,
    constants: tuple[float, float, float],
) -> Launch:
    from ....common.kernels import activation  # it imports triton

    width = shape[1] // 2 if gated else shape[1]
    return activation.forward(name, gated, shape[0], width, x_stride, DTYPE_NAMES[dtype], constants)


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    name: str,
    gated: bool,
    shape: torch.Size,
    strides: tuple[int, int],
    dtype: torch.dtype,
    constants: tuple[float, float, float],
) -> Launch:
    from ....common.kernels import activation  # it imports triton

    width = shape[1] // 2 if gated else shape[1]
    return activation.backward(name, gated, shape[0], width, strides, DTYPE_NAMES[dtype], constants)


def _empty_output(name: str, x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    if not ACTIVATIONS[name].gated:
        return x.new_empty(x.shape)
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _empty_gradient(name: str, dy: Tensor, x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


_traceable_forward = traceable(
    "activation_forward(str name, Tensor x, float limit, float alpha, float offset) -> Tensor",
    _forward,
    _empty_output,
)
_traceable_backward = traceable(
    "activation_backward(str name, Tensor dy, Tensor x, float limit, float alpha, float offset) -> Tensor",
    _backward,
    _empty_gradient,
)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "forward": activation_forward,
    "backward": activation_backward,
}


def operation(name: str) -> Callable[..., Any]:
    return OPERATIONS[name]  # torch 2.11's tracer does not know a bound dict.__getitem__


def refuses(request: ActivationRequest) -> str | None:
    return refuses_elementwise(request.device, request.dtype)


BACKEND: Backend[ActivationRequest] = Backend("triton", operation, refuses)

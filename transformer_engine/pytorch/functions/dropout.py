"""y = keep ? x / (1 - p) : 0, and y = residual + dropout(x + bias), differentiable; they save one bit an element."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..primitives.column_sums import column_sums
from ..primitives.dropout import (
    bias_add,
    bias_dropout_add_forward,
    draw_seed,
    dropout_backward,
    dropout_forward,
)
from ..runtime.autograd import Function
from ..runtime.double_backward import is_recorded, transposed
from ..runtime.tracing import export_mode
from ..tensor.storage.quantized_tensor_storage import plain_values


def dropout(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """y like x; the mask comes from one generator draw (None: the device's default one)."""
    _check_export(p)
    return _Dropout.apply(x, draw_seed(x.device, generator), p)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """y [.., H] = residual + dropout(x + bias [H]), in one pass over x and residual; p = 0 draws nothing."""
    _check_export(p)
    if p == 0.0 and export_mode.onnx and bias is not None:
        return residual + (x + bias)
    if p == 0.0:
        return residual + x if bias is None else _BiasAdd.apply(x, bias, residual)
    seed = draw_seed(x.device, generator)
    return _BiasDropoutAdd.apply(x, bias, residual, seed, p)


def _check_export(p: float) -> None:
    """Raise NotImplementedError if elements are dropped within `te.onnx_export`."""
    if export_mode.onnx and p > 0.0:
        raise NotImplementedError(
            f"dropout with p={p} cannot be exported to ONNX; call eval() of the model first"
        )


class _Dropout(Function):
    OPERATION = "dropout"

    @staticmethod
    def forward(ctx, x, seed, p):
        y, mask = dropout_forward(plain_values(x), p, seed=seed)
        ctx.save_for_backward(mask)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx, dy):
        (mask,) = ctx.saved_tensors
        return _masked(dy, mask, ctx.p), None, None


class _BiasDropoutAdd(Function):
    OPERATION = "dropout"

    @staticmethod
    def forward(ctx, x, bias, residual, seed, p):
        y, mask = bias_dropout_add_forward(
            plain_values(x), bias, plain_values(residual), p, seed=seed
        )
        ctx.save_for_backward(mask)
        ctx.p = p
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        (mask,) = ctx.saved_tensors
        dx = _masked(dy, mask, ctx.p)
        return dx, _bias_gradient(ctx, dx), dy, None, None


class _BiasAdd(Function):
    OPERATION = "a residual sum"

    @staticmethod
    def forward(ctx, x, bias, residual):
        ctx.bias_dtype = bias.dtype
        if type(x) is not Tensor or type(residual) is not Tensor:
            x, residual = plain_values(x), plain_values(residual)
        return bias_add(x, bias, residual)

    @staticmethod
    def backward(ctx, dy):
        return dy, _bias_gradient(ctx, dy), dy


def _masked(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    """dx = keep ? dy / (1 - p) : 0, which is its own transpose."""
    if not is_recorded():
        return dropout_backward(dy, mask, p)
    scaled = partial(dropout_backward, mask=mask, p=p)
    return transposed(scaled, scaled, dy)


def _bias_gradient(ctx, dx: Tensor) -> Tensor | None:
    if ctx.bias_dtype is None or not ctx.needs_input_grad[1]:
        return None
    if is_recorded():
        return dx.reshape(-1, dx.shape[-1]).float().sum(0).to(ctx.bias_dtype)
    return column_sums(dx.reshape(-1, dx.shape[-1]), ctx.bias_dtype)

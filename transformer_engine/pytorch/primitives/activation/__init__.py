"""y = f(x) and dx = dy * f'(x) for the twelve activations, and the table of backends that compute them."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from ..column_sums import column_sums
from ..quantize import Cast, Quantized
from ..quantize.fused_codes import gradient_fuses as gradient_fuses
from . import reference, triton
from .request import (
    ACTIVATIONS,
    DEFAULT_PARAMS,
    Activation,
    ActivationParams,
    ActivationRequest,
    request_of,
)

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PARAMS",
    "TABLE",
    "Activation",
    "ActivationParams",
    "ActivationRequest",
    "activation_backward",
    "activation_forward",
    "gradient_fuses",
]


@overload
def activation_forward(
    name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS, cast: None = None
) -> Tensor: ...


@overload
def activation_forward(name: str, x: Tensor, params: ActivationParams, cast: Cast) -> Quantized: ...


def activation_forward(
    name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS, cast: Cast | None = None
) -> Tensor | Quantized:
    """y = f(x) [...], or for gated units y [..., F] = f(x[..., :F]) * x[..., F:]; y in x's dtype, or as a cast asks.

    With a cast, of a matrix x, y's place is taken by the codes that quantizing y gives. On a GPU those with one scale
    a tensor or a block are made where y is: y itself is never stored, unless one scale is to be made from its maximum,
    which is found on the way.
    """
    facts = (name, x.shape, x.stride(), x.dtype, x.device, params.constants)
    if cast is None:
        return TABLE.bound(facts)(x)
    spec, multiplier, record = cast
    key = (*facts, None, spec, multiplier is not None, record is not None)
    return TABLE.bound(key)(x, multiplier, record)


@overload
def activation_backward(
    name: str, dy: Tensor, x: Tensor, params: ActivationParams = DEFAULT_PARAMS, cast: None = None
) -> Tensor: ...


@overload
def activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    params: ActivationParams,
    cast: Cast,
    dbias: torch.dtype | None = None,
) -> tuple[Quantized, Tensor | None]: ...


def activation_backward(
    name: str,
    dy: Tensor,
    x: Tensor,
    params: ActivationParams = DEFAULT_PARAMS,
    cast: Cast | None = None,
    dbias: torch.dtype | None = None,
) -> Tensor | tuple[Quantized, Tensor | None]:
    """dx, shaped and typed like x; dy is shaped like the output of activation_forward.

    With a cast, (the codes of dx [M, N], the sum over its rows [N]): bit for bit those of separate steps.

    dbias   dtype of the sum, which is made in float32 from the rounded dx, in an order of the backend's; None: no sum.
            With one, blocks of rows alone are cast after dx is stored; for these, `gradient_fuses` is False
    """
    constants, gradient = params.constants, (dy.stride(), dy.dtype)
    facts = (name, x.shape, x.stride(), x.dtype, x.device, constants, gradient)
    if cast is None:
        return TABLE.bound(facts)(dy, x)
    spec, multiplier, record = cast
    key = (*facts, spec, multiplier is not None, record is not None, dbias)
    return TABLE.bound(key)(dy, x, multiplier, record)


def _forward(x: Tensor, name: str, limit: float, alpha: float, offset: float) -> Tensor:
    return TABLE.bound((name, x.shape, x.stride(), x.dtype, x.device, (limit, alpha, offset)))(x)


def _forward_results(x: Tensor, name: str, limit: float, alpha: float, offset: float) -> Tensor:
    if not ACTIVATIONS[name].gated:
        return x.new_empty(x.shape)
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _backward(dy: Tensor, x: Tensor, name: str, limit: float, alpha: float, offset: float) -> Tensor:
    constants, gradient = (limit, alpha, offset), (dy.stride(), dy.dtype)
    return TABLE.bound((name, x.shape, x.stride(), x.dtype, x.device, constants, gradient))(dy, x)


def _backward_results(dy: Tensor, x: Tensor, name: str, limit: float, alpha: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


_CONSTANTS = "str name, float limit, float alpha, float offset"
_forward_operator = operator(
    f"activation_forward(Tensor x, {_CONSTANTS}) -> Tensor", _forward, _forward_results
)
_backward_operator = operator(
    f"activation_backward(Tensor dy, Tensor x, {_CONSTANTS}) -> Tensor", _backward, _backward_results
)


def _operator_of(request: ActivationRequest) -> Operator:
    """Of the activation alone: a cast behind it is an operator of its own, and so are sums."""
    limit, alpha, offset = request.constants
    one = _backward_operator if request.backward else _forward_operator
    alone = one.given(name=request.name, limit=limit, alpha=alpha, offset=offset)
    if request.cast is None:
        return alone
    return Operator(*(reference.with_cast(request, step, column_sums) for step in alone))


TABLE: Table[ActivationRequest] = Table(
    "activation", (triton.BACKEND, reference.BACKEND), describe=request_of, operator=_operator_of
)

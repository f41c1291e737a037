"""y = f(x) and dx = dy * f'(x) for the twelve activations, and their backend table."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from ..column_sums import column_sums
from ..operand import Operand
from ..quantize import Cast, Quantized
from ..quantize.fused_codes import gradient_fuses as gradient_fuses
from . import reference, triton
from .request import (
    ACTIVATIONS,
    DEFAULT_PARAMS,
    ActivationKind,
    ActivationParams,
    ActivationRequest,
    Constants,
    MeasuredGradient,
    OutputCast,
    make_request,
)

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PARAMS",
    "TABLE",
    "ActivationKind",
    "ActivationParams",
    "ActivationRequest",
    "MeasuredGradient",
    "OutputCast",
    "activation_backward",
    "activation_backward_and_output",
    "activation_forward",
    "gradient_fuses",
]


def _activation_constants(name: str, params: ActivationParams) -> Constants:
    """The constants of an activation; zeros if it has none.

    Unused constants are not read: with dynamic shapes, torch 2.11 turns each float that a compiled function reads into
    a graph input, and compiles the graph again.
    """
    return params.constants if name == "clamped_swiglu" else (0.0, 0.0, 0.0)


@overload
def activation_forward(
    name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS, cast: None = None
) -> Tensor: ...


@overload
def activation_forward(name: str, x: Tensor, params: ActivationParams, cast: Cast) -> Quantized: ...


def activation_forward(
    name: str, x: Tensor, params: ActivationParams = DEFAULT_PARAMS, cast: Cast | None = None
) -> Tensor | Quantized:
    """y = f(x) [...], or for gated units y [..., F] = f(x[..., :F]) * x[..., F:]; y in x's dtype, or codes.

    With a cast, x is a matrix, and the codes of y are returned instead of y. On a GPU the kernel writes codes with
    one scale per tensor or per block. Then y is not stored, unless one scale is computed from its maximum.
    """
    facts = (name, x.shape, x.stride(), x.dtype, x.device, _activation_constants(name, params))
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
    """Return dx, with the shape and dtype of x.

    With a cast, return the codes of dx [M, N] and the sum over its rows [N], bit-equal to separate steps.

    Args:
        name: Activation name.
        dy: Gradient, shaped like the output of `activation_forward`.
        x: Activation input.
        params: Activation constants.
        cast: Cast of dx, or None.
        dbias: Sum dtype. The sum is computed in float32 from the rounded dx in an order that
            depends on the backend; None: no sum. With a sum, codes in row-wise blocks only are cast
            after dx is stored; for these, `gradient_fuses` is False.
    """
    constants, gradient = _activation_constants(name, params), (dy.stride(), dy.dtype)
    facts = (name, x.shape, x.stride(), x.dtype, x.device, constants, gradient)
    if cast is None:
        return TABLE.bound(facts)(dy, x)
    spec, multiplier, record = cast
    key = (*facts, spec, multiplier is not None, record is not None, dbias)
    return TABLE.bound(key)(dy, x, multiplier, record)


def activation_backward_and_output(
    name: str,
    dy: Tensor,
    x: Tensor | Operand,
    params: ActivationParams,
    cast: Cast | None,
    output: OutputCast,
) -> tuple[MeasuredGradient | Quantized, Quantized]:
    """Return dx with its maximum, or with a cast its codes; and the column-wise codes of f(x).
    Results equal separate steps bit for bit.

    On a GPU one kernel reads dy and x, so that the forward pass need not save codes of f(x).

    Args:
        name: Activation name.
        dy: Gradient [M, F].
        x: Activation input [M, F], or [M, 2F] if gated; or its codes in blocks of 1 x 128
            (BLOCK_1D) with F a multiple of 128, from whose values dx and f(x) are computed.
        params: Activation constants.
        cast: Cast of dx with a given multiplier, or None.
        output: Cast of f(x).
    """
    constants, gradient = _activation_constants(name, params), (dy.stride(), dy.dtype)
    spec, multiplier, record = (None, None, None) if cast is None else cast
    described = (spec, multiplier is not None, record is not None, None, output.spec)
    encoded = isinstance(x, Operand)
    codes = x.codes if encoded else x
    facts = (
        name,
        codes.shape,
        codes.stride(),
        x.dtype,
        codes.device,
        constants,
        gradient,
        *described,
        encoded,
    )
    return TABLE.bound(facts)(dy, x, multiplier, record, output.multiplier, output.amax)


def _forward(x: Tensor, name: str, limit: float, alpha: float, offset: float) -> Tensor:
    return TABLE.bound((name, x.shape, x.stride(), x.dtype, x.device, (limit, alpha, offset)))(x)


def _backward(
    dy: Tensor, x: Tensor, name: str, limit: float, alpha: float, offset: float
) -> Tensor:
    constants, gradient = (limit, alpha, offset), (dy.stride(), dy.dtype)
    return TABLE.bound((name, x.shape, x.stride(), x.dtype, x.device, constants, gradient))(dy, x)


_CONSTANTS = "str name, float limit, float alpha, float offset"
_forward_operator = operator(
    f"activation_forward(Tensor x, {_CONSTANTS}) -> Tensor",
    _forward,
    lambda x, name, limit, alpha, offset: (
        x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if ACTIVATIONS[name].gated
        else x.new_empty(x.shape)
    ),
)
_backward_operator = operator(
    f"activation_backward(Tensor dy, Tensor x, {_CONSTANTS}) -> Tensor",
    _backward,
    lambda dy, x, name, limit, alpha, offset: x.new_empty(x.shape),
)


def _make_operator(request: ActivationRequest) -> Operator:
    """Return the operator of the activation; a cast and column sums are separate operators."""
    limit, alpha, offset = request.constants
    operator = _backward_operator if request.backward else _forward_operator
    alone = operator.given(name=request.name, limit=limit, alpha=alpha, offset=offset)
    if request.output is not None:
        rest = request._replace(output=None, encoded=False)
        value = _forward_operator.given(name=request.name, limit=limit, alpha=alpha, offset=offset)
        steps = zip(_make_operator(rest), value, strict=True)
        return Operator(*[reference.with_output(request, *pair) for pair in steps])
    if request.cast is None:
        return alone
    return Operator(*(reference.with_cast(request, step, column_sums) for step in alone))


TABLE: Table[ActivationRequest] = Table(
    "activation",
    (triton.BACKEND, reference.BACKEND),
    describe=make_request,
    operator=_make_operator,
)

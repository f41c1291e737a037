"""y = f(x) and dx = dy * f'(x) for the twelve activations, and the table of backends that compute them."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Backend, Table
from ..quantize import Cast, Quantized
from . import reference, triton
from .quantized import gradient_fuses as gradient_fuses
from .request import ACTIVATIONS, DEFAULT_PARAMS, Activation, ActivationParams, ActivationRequest

TABLE: Table[ActivationRequest] = Table("activation", (triton.BACKEND, reference.BACKEND))


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
    return _select(name, False, x).run("forward")(name, x, params, cast)


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
    return _select(name, True, x).run("backward")(name, dy, x, params, cast, dbias)


def _select(name: str, backward: bool, x: Tensor) -> Backend[ActivationRequest]:
    def describe() -> ActivationRequest:
        _check(name, x)
        return ActivationRequest(name, backward, x.shape, x.dtype, x.device)

    if torch.compiler.is_compiling():
        return TABLE.select(describe())
    return TABLE.choice((name, backward, x.shape, x.dtype, x.device), describe)


def _check(name: str, x: Tensor) -> None:
    activation = ACTIVATIONS.get(name)
    if activation is None:
        raise ValueError(f"there is no activation {name!r}; choose one of {', '.join(ACTIVATIONS)}")
    if activation.gated and x.shape[-1] % 2:
        raise ValueError(
            f"{name} halves the last dimension, and {x.shape[-1]} is odd; "
            "give it [..., 2F], activated half first"
        )

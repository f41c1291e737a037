"""y [M, H] = normalize(x) * gamma (+ beta), its gradients, and the table of backends that compute them.

A backend's `run` takes the name of one of the operations and returns the function that computes it, so
that `use_backend(norm="...")` forces all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ....common.dispatch import Table
from ..quantize import Cast, Quantized
from . import reference, triton
from .request import NormRequest

TABLE: Table[NormRequest] = Table("norm", (triton.BACKEND, reference.BACKEND))


@overload
def layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, cast: None = None
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, cast: Cast
) -> tuple[Quantized, Tensor, Tensor]: ...


def layernorm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    cast: Cast | None = None,
) -> tuple[Tensor | Quantized, Tensor, Tensor]:
    """y [M, H] = (x - mean) * rstdev * gamma + bias; mean, rstdev float32 [M]; y in x's dtype, or as a cast asks.

    With a cast, y's place is taken by the codes that quantizing y gives. On a GPU those with one scale a tensor are
    made where y is, as are those of 1 x 128 blocks of rows alone: y itself is never stored, unless one scale is to be
    made from its maximum, which is found on the way.
    """
    return _select("layernorm_forward", x, weight)(x, weight, bias, eps, zero_centered, cast)


def layernorm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [M, H] in x's dtype, dweight [H], dbias [H] in weight's dtype), sums in float32."""
    return _select("layernorm_backward", x, weight)(dy, x, mean, rstdev, weight, zero_centered)


@overload
def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: None = None
) -> tuple[Tensor, Tensor]: ...


@overload
def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast
) -> tuple[Quantized, Tensor]: ...


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast: Cast | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    """y [M, H] = x * rstdev * gamma; rstdev float32 [M] = rsqrt(E[x²] + eps); y in x's dtype, or as a cast asks."""
    return _select("rmsnorm_forward", x, weight)(x, weight, eps, zero_centered, cast)


def rmsnorm_backward(
    dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, zero_centered: bool, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx [M, H] + add in x's dtype, dweight [H] in weight's dtype), sums in float32."""
    return _select("rmsnorm_backward", x, weight)(dy, x, rstdev, weight, zero_centered, add)


def _select(operation: str, x: Tensor, weight: Tensor) -> Callable[..., Any]:
    def describe() -> NormRequest:
        return NormRequest(operation, x.shape[0], x.shape[1], x.dtype, weight.dtype, x.device)

    if torch.compiler.is_compiling():
        return TABLE.select(describe()).run(operation)
    key = (operation, x.shape, x.dtype, weight.dtype, x.device)
    return TABLE.choice(key, describe).run(operation)

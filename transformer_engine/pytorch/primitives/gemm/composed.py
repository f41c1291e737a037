"""Requests for products with GELU, its gradient, or a cast to FP8, and the backend that computes them in two steps.

The two steps are the product, then the activation or the cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....common import dispatch
from ....common.dispatch import Backend, interventions
from ..activation import activation_backward, activation_forward
from ..operand import Operand
from ..quantize import Cast, Quantized, quantize_as
from . import request
from .product import product
from .request import Epilogue, GemmRequest, MatrixLayout

GELU = "gelu"
GELU_GRADIENT = "gelu_gradient"
CODES = "codes"
KINDS = frozenset({GELU, GELU_GRADIENT, CODES})


@dataclass(frozen=True)
class FusedRequest:
    """A product and the operation that follows it.

    Attributes:
        kind: GELU, GELU_GRADIENT or CODES.
        product: The product's request. Its dtype is the result dtype; for CODES, the nominal dtype.
        second: Whether there is a second result. GELU: the activation's input; CODES: the recorded absolute maximum.
        x: Layout of the activation input, for GELU_GRADIENT only.
        dtype: Dtype of the activation input or the codes; None for GELU.
        forced: Reason to compute the two steps separately, if a backend is forced for one of them.
    """

    kind: str
    product: GemmRequest
    second: bool
    x: MatrixLayout | None
    dtype: torch.dtype | None
    forced: str | None

    @property
    def features(self) -> tuple[str, ...]:
        return (self.kind,)

    @classmethod
    def of(
        cls,
        kind: str,
        a: Operand,
        b: Operand,
        epilogue: Epilogue,
        second: bool,
        x: Tensor | None,
        dtype: torch.dtype | None,
    ) -> FusedRequest:
        """Return the request for this product and the operation that follows it."""
        return described(*request_key(kind, a, b, epilogue, second, x, dtype))


def request_key(
    kind: str,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    second: bool,
    x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Return the arguments of `described`, without building the request."""
    x_layout = None if x is None else (x.shape, x.stride(), x.device)
    forced = None
    if interventions:
        for operation in ("gemm", "activation", "quantize"):
            name = dispatch.forced_backend(operation)
            if name is not None and name != "cublaslt":
                forced = f"use_backend({operation}={name!r}) is in force"
                break
    return kind, second, x_layout, dtype, forced, *request.request_key(a, b, epilogue)


def described(
    kind: str,
    second: bool,
    x_layout: tuple[Sequence[int], Sequence[int], torch.device] | None,
    dtype: torch.dtype | None,
    forced: str | None,
    *product: Any,
) -> FusedRequest:
    """Return the request for a key.

    Raises:
        ValueError: The extents or devices do not match, or epilogue.out is given.
    """
    of_product = request.described(*product)
    if product[request.OUT] is not None:
        raise ValueError(
            "the result of an activation or a cast is allocated by the product; leave epilogue.out out"
        )
    if x_layout is None:
        return FusedRequest(kind, of_product, second, None, dtype, forced)
    shape, strides, _ = x_layout
    if tuple(shape) != (of_product.m, of_product.n):
        raise ValueError(f"x has shape {tuple(shape)}; it must be ({of_product.m}, {of_product.n})")
    return FusedRequest(kind, of_product, second, MatrixLayout.of(shape, strides), dtype, forced)


def gelu(keeps: bool, a: Operand, b: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """Return (gelu(x), x or None) for x = a @ b.T + bias, rounded to epilogue.dtype before the activation."""
    x = product(a, b, epilogue)
    return activation_forward("gelu", x), x if keeps else None


def gelu_gradient(_: bool, a: Operand, b: Operand, epilogue: Epilogue, x: Tensor) -> Tensor:
    """Return (a @ b.T) * gelu'(x), with the product rounded to epilogue.dtype before the multiplication."""
    return activation_backward("gelu", product(a, b, epilogue), x)


def codes(records: bool, a: Operand, b: Operand, epilogue: Epilogue, cast: Cast) -> Quantized:
    """Cast y = a @ b.T + bias, rounded to epilogue.dtype before it is scaled."""
    return quantize_as(product(a, b, epilogue), cast)


_KINDS: dict[str, Callable[..., Any]] = {GELU: gelu, GELU_GRADIENT: gelu_gradient, CODES: codes}


def bind(request: FusedRequest) -> Callable[..., Any]:
    """Return the function for the request's kind, called without its first argument."""
    return functools.partial(_KINDS[request.kind], request.second)


BACKEND: Backend[FusedRequest] = Backend("composed", takes=KINDS, bind=bind)

"""The same as one call of a library that knows an epilogue: a product, then the activation or the cast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend
from ..activation import activation_backward, activation_forward
from ..operand import Operand
from ..quantize import Cast, Quantized, quantize_as
from .fused_request import CODES, GELU, GELU_GRADIENT, KINDS, FusedRequest
from .product import product
from .request import Epilogue


def gelu(keeps: bool, a: Operand, b: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """(gelu(x), x or None) of x = a @ b.T + bias, rounded to epilogue.dtype before the activation."""
    x = product(a, b, epilogue)
    return activation_forward("gelu", x), x if keeps else None


def gelu_gradient(_: bool, a: Operand, b: Operand, epilogue: Epilogue, x: Tensor) -> Tensor:
    """(a @ b.T) * gelu'(x), the product rounded to epilogue.dtype before it is multiplied."""
    return activation_backward("gelu", product(a, b, epilogue), x)


def codes(records: bool, a: Operand, b: Operand, epilogue: Epilogue, cast: Cast) -> Quantized:
    """The cast of y = a @ b.T + bias, rounded to epilogue.dtype before it is scaled."""
    return quantize_as(product(a, b, epilogue), cast)


_KINDS: dict[str, Callable[..., Any]] = {GELU: gelu, GELU_GRADIENT: gelu_gradient, CODES: codes}


def bind(request: FusedRequest) -> Callable[..., Any]:
    """What computes the request, without the first argument of its kind's function."""
    return functools.partial(_KINDS[request.kind], request.second)


BACKEND: Backend[FusedRequest] = Backend("composed", takes=KINDS, bind=bind)

"""The same as one call of a library that knows an epilogue: a product, then the activation or the cast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT8, Element
from ..activation import activation_backward, activation_forward
from ..operand import Operand
from ..quantize import QuantizeSpec, quantize
from .fused_request import CODES, GELU, GELU_GRADIENT, FusedRequest
from .product import gemm
from .request import Epilogue


def gelu(keeps: bool, a: Operand, b: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
    """(gelu(x), x or None) of x = a @ b.T + bias, rounded to epilogue.dtype before the activation."""
    x = gemm(a, b, epilogue)
    return activation_forward("gelu", x), x if keeps else None


def gelu_gradient(_: bool, a: Operand, b: Operand, epilogue: Epilogue, x: Tensor) -> Tensor:
    """(a @ b.T) * gelu'(x), the product rounded to epilogue.dtype before it is multiplied."""
    return activation_backward("gelu", gemm(a, b, epilogue), x)


def codes(
    records: bool,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    element: Element,
    scale: Tensor,
    record: Tensor | None,
) -> Tensor:
    """saturate(y * scale) of y = a @ b.T + bias, rounded to epilogue.dtype before it is scaled."""
    made = quantize(gemm(a, b, epilogue), QuantizeSpec(FLOAT8, element), scale=scale, record=record).codes
    assert made is not None
    return made


_KINDS: dict[str, Callable[..., Any]] = {GELU: gelu, GELU_GRADIENT: gelu_gradient, CODES: codes}


def run(request: FusedRequest) -> Callable[..., Any]:
    """What computes the request, without the first argument of its kind's function."""
    return functools.partial(_KINDS[request.kind], request.second)


def refuses(request: FusedRequest) -> str | None:
    return None


BACKEND: Backend[FusedRequest] = Backend("composed", run, refuses)

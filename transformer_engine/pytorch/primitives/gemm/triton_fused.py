"""GELU and its gradient in the epilogue of Triton products, for products that Triton computes anyway.

The product is rounded to the result's dtype before the activation, as in two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend, always_depends
from ..operand import Operand
from . import triton
from .composed import GELU, GELU_GRADIENT, FusedRequest
from .product import TABLE
from .request import Epilogue, MatrixLayout


def unsupported_reason(request: FusedRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.forced is not None:
        return request.forced
    product = request.product
    if (reason := triton.unsupported_reason(product)) is not None:
        return reason
    chosen = TABLE.chosen(product)
    if chosen != triton.BACKEND.name:
        return f"{chosen} computes the product, and a kernel the activation"
    if request.kind == GELU_GRADIENT and request.x != MatrixLayout(True, product.n):
        return "the activation's input is not contiguous"
    return None


def bind(request: FusedRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments as the function for this kind in `composed`."""
    run = triton.runner(request.product)

    def gelu(a: Operand, b: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor | None]:
        saved = (
            a.codes.new_empty((a.rows, b.rows), dtype=epilogue.dtype) if request.second else None
        )
        return run(a, b, epilogue, triton.Activation("gelu", None, saved)), saved

    def gradient(a: Operand, b: Operand, epilogue: Epilogue, x: Tensor) -> Tensor:
        return run(a, b, epilogue, triton.Activation("gelu_gradient", x))

    return triton.run_on_device(gelu if request.kind == GELU else gradient)


BACKEND: Backend[FusedRequest] = Backend(
    "triton",
    takes=frozenset({GELU, GELU_GRADIENT}),
    unsupported_reason=unsupported_reason,
    bind=bind,
    opaque=True,
    batch_dependent=always_depends("by a tile that is chosen by their number"),
)

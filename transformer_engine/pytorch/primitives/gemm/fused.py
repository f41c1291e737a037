"""Products with GELU, the gradient of GELU, or a cast to FP8: one call of the library where it knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ....common.bounded import Bounded
from ....common.dispatch import Table, undisturbed
from .. import launching
from ..operand import Operand
from ..quantize import Cast, torch_dtype
from . import composed, cublaslt_fused, product
from .fused_request import CODES, GELU, GELU_GRADIENT, FusedRequest
from .request import Epilogue

TABLE: Table[FusedRequest] = Table("gemm_epilogue", (cublaslt_fused.BACKEND, composed.BACKEND))

_calls: Bounded[Hashable, Callable[..., Any]] = Bounded(4096)


def gemm_gelu(
    a: Operand, b: Operand, epilogue: Epilogue, keeps_input: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(y, x): y [M, N] = gelu(x) with tanh, x = a [M, K] @ b [N, K].T (+ bias), both in epilogue.dtype.

    keeps_input=False: nobody needs x, which is then None and need not exist. ValueError as from `gemm`.
    """
    if torch.compiler.is_compiling():
        return _traced_gelu(a, b, epilogue, keeps_input)
    return _call(GELU, a, b, epilogue, keeps_input)(a, b, epilogue)


def gemm_gelu_gradient(a: Operand, b: Operand, x: Tensor, epilogue: Epilogue) -> Tensor:
    """dx [M, N] = (a [M, K] @ b [N, K].T) * gelu'(x [M, N]) in epilogue.dtype, GELU with tanh.

    ValueError as from `gemm`, and for an epilogue with a bias.
    """
    if epilogue.bias is not None:
        raise ValueError("a gradient has no bias to add; leave epilogue.bias out")
    if torch.compiler.is_compiling():
        return _traced_gradient(a, b, x, epilogue)
    return _call(GELU_GRADIENT, a, b, epilogue, False, x, x.dtype)(a, b, epilogue, x)


def gemm_codes(a: Operand, b: Operand, epilogue: Epilogue, cast: Cast) -> Tensor:
    """codes [M, N] = saturate(y * multiplier [1]) of y = a [M, K] @ b [N, K].T (+ bias), in the torch dtype of the
    cast's element: row-wise ones, with a multiplier that is given, and no record of max|y| while compiling.

    epilogue.dtype   what y is, or would be, rounded to; its bias is read in that dtype
    """
    element, scale, record = cast.spec.element, cast.multiplier, cast.record
    assert scale is not None, "a product does not know the maximum of its result beforehand"
    if torch.compiler.is_compiling():
        return composed.codes(record is not None, a, b, epilogue, element, scale, record)
    call = _call(CODES, a, b, epilogue, record is not None, None, torch_dtype(element))
    return call(a, b, epilogue, element, scale, record)


def _call(
    kind: str,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    second: bool,
    x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """What computes this request and every other one that looks like it, remembered."""
    if not undisturbed() or product._dispatch_modes():
        return _chosen(kind, a, b, epilogue, second, x, dtype)
    lies = None if x is None else (x.shape, x.stride(), x.get_device())
    key = (kind, second, lies, dtype, product._signature(a, b, epilogue))
    call = _calls.get(key)
    if call is None:
        call = _calls.keep(key, _chosen(kind, a, b, epilogue, second, x, dtype))
    return call


def _chosen(
    kind: str,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    second: bool,
    x: Tensor | None,
    dtype: torch.dtype | None,
) -> Callable[..., Any]:
    request = _request(kind, a, b, epilogue, second, x, dtype)
    if a.rows == 0 or b.rows == 0 or a.depth == 0:
        return composed.run(request)
    return TABLE.select(request).run(request)


def _request(
    kind: str,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    second: bool,
    x: Tensor | None,
    dtype: torch.dtype | None,
) -> FusedRequest:
    product._check(a, b, epilogue)
    if epilogue.out is not None:
        raise ValueError(
            "the result of an activation or a cast is allocated by the product; leave epilogue.out out"
        )
    if x is not None and x.shape != (a.rows, b.rows):
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be ({a.rows}, {b.rows})")
    return FusedRequest.of(kind, a, b, epilogue, second, x, dtype)


def _fuses_traced(request: FusedRequest, a: Operand, b: Operand) -> bool:
    """Is the library called, in an operator that a compiler does not look into?"""
    if a.rows == 0 or b.rows == 0 or a.depth == 0:
        return False
    return TABLE.select(request).name == cublaslt_fused.BACKEND.name


def _traced_gelu(a: Operand, b: Operand, epilogue: Epilogue, keeps: bool) -> tuple[Tensor, Tensor | None]:
    request = _request(GELU, a, b, epilogue, keeps, None, None)
    if not _fuses_traced(request, a, b):
        return composed.gelu(keeps, a, b, epilogue)
    made = _product_gelu(*_tensors(a, b), epilogue.bias, epilogue.dtype, epilogue.exact, keeps)
    return made[0], made[1] if keeps else None


def _traced_gradient(a: Operand, b: Operand, x: Tensor, epilogue: Epilogue) -> Tensor:
    request = _request(GELU_GRADIENT, a, b, epilogue, False, x, x.dtype)
    if not _fuses_traced(request, a, b):
        return composed.gelu_gradient(False, a, b, epilogue, x)
    return _product_gelu_gradient(*_tensors(a, b), x, epilogue.dtype, epilogue.exact)


def _tensors(a: Operand, b: Operand) -> tuple[Any, ...]:
    names = [None if operand.format is None else operand.format.name for operand in (a, b)]
    return a.codes, a.scale, names[0], b.codes, b.scale, names[1]


def _operands(a, a_scale, a_format, b, b_scale, b_format) -> tuple[Operand, Operand]:
    named = product.format_named
    return Operand(a, a_scale, named(a_format)), Operand(b, b_scale, named(b_format))


def _product_gelu_now(a, a_scale, a_format, b, b_scale, b_format, bias, dtype, exact, keeps) -> list[Tensor]:
    left, right = _operands(a, a_scale, a_format, b, b_scale, b_format)
    epilogue = Epilogue(dtype, bias, exact=exact)
    return [
        made for made in _call(GELU, left, right, epilogue, keeps)(left, right, epilogue) if made is not None
    ]


def _product_gelu_fake(a, a_scale, a_format, b, b_scale, b_format, bias, dtype, exact, keeps) -> list[Tensor]:
    shape = (a.shape[0], b.shape[0])
    return [a.new_empty(shape, dtype=dtype) for _ in range(2 if keeps else 1)]


def _product_gelu_gradient_now(a, a_scale, a_format, b, b_scale, b_format, x, dtype, exact) -> Tensor:
    left, right = _operands(a, a_scale, a_format, b, b_scale, b_format)
    epilogue = Epilogue(dtype, exact=exact)
    return _call(GELU_GRADIENT, left, right, epilogue, False, x, x.dtype)(left, right, epilogue, x)


def _product_gelu_gradient_fake(a, a_scale, a_format, b, b_scale, b_format, x, dtype, exact) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


_OPERANDS = "Tensor a, Tensor? a_scale, str? a_format, Tensor b, Tensor? b_scale, str? b_format"
_product_gelu = launching.traceable(
    f"product_gelu({_OPERANDS}, Tensor? bias, ScalarType dtype, bool exact, bool keeps) -> Tensor[]",
    _product_gelu_now,
    _product_gelu_fake,
)
_product_gelu_gradient = launching.traceable(
    f"product_gelu_gradient({_OPERANDS}, Tensor x, ScalarType dtype, bool exact) -> Tensor",
    _product_gelu_gradient_now,
    _product_gelu_gradient_fake,
)

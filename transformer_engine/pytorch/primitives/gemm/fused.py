"""Products with GELU, the gradient of GELU, or a cast to FP8: one library call where cuBLASLt supports the epilogue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from ..operand import Operand, OwnedOperand
from ..quantize import Cast, Quantized, quantize_as, torch_dtype
from . import composed, cublaslt_fused, triton_fused
from .composed import CODES, GELU, GELU_GRADIENT, FusedRequest, described, request_key
from .product import product
from .request import Epilogue, format_named


@overload
def gemm(a: Operand, b: Operand, epilogue: Epilogue, cast: None = None) -> Tensor: ...


@overload
def gemm(a: Operand, b: Operand, epilogue: Epilogue, cast: Cast) -> Quantized: ...


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, cast: Cast | None = None
) -> Tensor | Quantized:
    """y [M, N] = a [M, K] @ b [N, K].T (+ bias [N]) in epilogue.dtype; both operands end in the contracted axis.

    With epilogue.out, the result is written there (accumulate=True: added to it) and returned. With a cast,
    the codes of y are returned instead. cuBLASLt computes row-wise FP8 codes if their multiplier is given,
    from products that are not rounded to epilogue.dtype first. While compiling, max|y| is not recorded. The
    function is not differentiable: its callers are the forward and backward of autograd functions.

    Raises:
        ValueError: Operand, bias and out sizes do not match.
        Unsupported: No backend supports the formats.
    """
    if cast is None:
        return product(a, b, epilogue)
    spec, multiplier, record = cast
    if (
        multiplier is None
        or spec.columnwise
        or not spec.rowwise
        or not type(a) is type(b) is Operand
    ):
        return quantize_as(product(a, b, epilogue), cast)
    key = request_key(CODES, a, b, epilogue, record is not None, None, torch_dtype(spec.element))
    return TABLE.bound(key)(a, b, epilogue, cast)


def gemm_gelu(
    a: Operand, b: Operand, epilogue: Epilogue, keeps_input: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(y, x): y [M, N] = gelu(x) with tanh, x = a [M, K] @ b [N, K].T (+ bias), both in epilogue.dtype.

    With keeps_input=False, x is not stored and None is returned.

    Raises:
        ValueError: See `gemm`.
    """
    if not type(a) is type(b) is Operand:
        result = a.multiply_gelu(b, epilogue, keeps_input) if isinstance(a, OwnedOperand) else None
        return composed.gelu(keeps_input, a, b, epilogue) if result is None else result
    return TABLE.bound(request_key(GELU, a, b, epilogue, keeps_input))(a, b, epilogue)


def gemm_gelu_gradient(a: Operand, b: Operand, x: Tensor, epilogue: Epilogue) -> Tensor:
    """dx [M, N] = (a [M, K] @ b [N, K].T) * gelu'(x [M, N]) in epilogue.dtype, GELU with tanh.

    Raises:
        ValueError: The epilogue has a bias; otherwise see `gemm`.
    """
    if epilogue.bias is not None:
        raise ValueError("a gradient has no bias to add; leave epilogue.bias out")
    if not type(a) is type(b) is Operand:
        result = a.multiply_gelu_gradient(b, epilogue, x) if isinstance(a, OwnedOperand) else None
        return composed.gelu_gradient(False, a, b, epilogue, x) if result is None else result
    return TABLE.bound(request_key(GELU_GRADIENT, a, b, epilogue, False, x, x.dtype))(
        a, b, epilogue, x
    )


# The operators for torch.compile.

_OPERANDS = (
    "Tensor a, Tensor? a_scale, Tensor? a_amax, str? a_format, "
    "Tensor b, Tensor? b_scale, Tensor? b_amax, str? b_format"
)


def _product_gelu_now(
    a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, bias, dtype, exact, keeps
) -> list[Tensor]:
    left = Operand(a, a_scale, format_named(a_format), a_amax)
    right = Operand(b, b_scale, format_named(b_format), b_amax)
    results = gemm_gelu(left, right, Epilogue(dtype, bias, exact=exact), keeps)
    return [tensor for tensor in results if tensor is not None]


def _product_gelu_gradient_now(
    a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, x, dtype, exact
) -> Tensor:
    left = Operand(a, a_scale, format_named(a_format), a_amax)
    right = Operand(b, b_scale, format_named(b_format), b_amax)
    return gemm_gelu_gradient(left, right, x, Epilogue(dtype, exact=exact))


_product_gelu = operator(
    f"product_gelu({_OPERANDS}, Tensor? bias, ScalarType dtype, bool exact, bool keeps) -> Tensor[]",
    _product_gelu_now,
    lambda a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, bias, dtype, exact, keeps: [
        a.new_empty((a.shape[0], b.shape[0]), dtype=dtype) for _ in range(2 if keeps else 1)
    ],
)
_product_gelu_gradient = operator(
    f"product_gelu_gradient({_OPERANDS}, Tensor x, ScalarType dtype, bool exact) -> Tensor",
    _product_gelu_gradient_now,
    lambda a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, x, dtype, exact: a.new_empty(
        (a.shape[0], b.shape[0]), dtype=dtype
    ),
)


def _tensors(a: Operand, b: Operand) -> tuple[Any, ...]:
    names = [None if operand.format is None else operand.format.name for operand in (a, b)]
    return a.codes, a.scale, a.amax, names[0], b.codes, b.scale, b.amax, names[1]


def _gelu(
    product: Callable[..., list[Tensor]], keeps: bool, a: Operand, b: Operand, epilogue: Epilogue
) -> tuple[Tensor, Tensor | None]:
    results = product(*_tensors(a, b), epilogue.bias, epilogue.dtype, epilogue.exact, keeps)
    return results[0], results[1] if keeps else None


def _gelu_gradient(
    product: Callable[..., Tensor], _: bool, a: Operand, b: Operand, epilogue: Epilogue, x: Tensor
) -> Tensor:
    return product(*_tensors(a, b), x, epilogue.dtype, epilogue.exact)


def _codes_results(
    records: bool, a: Operand, b: Operand, epilogue: Epilogue, cast: Cast
) -> Quantized:
    codes = a.codes.new_empty((a.rows, b.rows), dtype=torch_dtype(cast.spec.element))
    return Quantized(codes, a.codes.new_empty(1, dtype=torch.float32), amax=cast.record)


def _make_operator(request: FusedRequest) -> Operator:
    if request.kind == CODES:
        # Two steps that a compiler traces: an operator that updates a record would have to declare the mutation.
        return Operator(
            functools.partial(composed.codes, request.second),
            functools.partial(_codes_results, request.second),
        )
    shell, operator = (
        (_gelu, _product_gelu) if request.kind == GELU else (_gelu_gradient, _product_gelu_gradient)
    )
    return Operator(
        functools.partial(shell, operator.call, request.second),
        functools.partial(shell, operator.results, request.second),
    )


TABLE: Table[FusedRequest] = Table(
    "gemm_epilogue",
    (cublaslt_fused.BACKEND, triton_fused.BACKEND, composed.BACKEND),
    describe=described,
    operator=_make_operator,
)

"""out [M, N] = a [M, K] @ b [N, K].T, then the epilogue: a warm call looks the backend up by its key once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ....common.formats import TensorFormat
from ....common.hardware import Hardware
from ...runtime.launching import operator
from ..operand import Operand
from . import cublaslt, reference, torch_mm, triton
from .request import (
    Epilogue,
    GemmRequest,
    MatrixLayout,
    described,
    format_named,
    is_compiling,
    key_in_eager_mode,
    request_key,
)

_REMEDY = "quantize both, or neither, with custom quantizers of one family"


def product(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Compute a [M, K] @ b [N, K].T and its epilogue; see `gemm`."""
    if type(a) is not Operand:
        return a.multiplied(b, epilogue)  # pyright: ignore[reportAttributeAccessIssue]
    if type(b) is not Operand:
        raise TypeError(f"an operand in a custom format is multiplied by a plain one; {_REMEDY}")
    if is_compiling():
        return TABLE.bound(request_key(a, b, epilogue))(a, b, epilogue)
    return TABLE.bound_in_eager_mode(key_in_eager_mode(a, b, epilogue))(a, b, epilogue)


# The operators for torch.compile. Eager mode and the graph run the same plan, so their results are equal bit for bit.

_OPERANDS = (
    "Tensor a, Tensor? a_scale, Tensor? a_amax, str? a_format, "
    "Tensor b, Tensor? b_scale, Tensor? b_amax, str? b_format, Tensor? bias"
)


def _product_now(
    a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, bias, dtype, exact
) -> Tensor:
    left = Operand(a, a_scale, format_named(a_format), a_amax)
    right = Operand(b, b_scale, format_named(b_format), b_amax)
    return product(left, right, Epilogue(dtype, bias, exact=exact))


def _product_results(
    a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, bias, dtype, exact
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _product_into_now(
    out, a, a_scale, a_amax, a_format, b, b_scale, b_amax, b_format, bias, accumulate, exact
) -> None:
    left = Operand(a, a_scale, format_named(a_format), a_amax)
    right = Operand(b, b_scale, format_named(b_format), b_amax)
    product(left, right, Epilogue(out.dtype, bias, out, accumulate, exact))


_product = operator(
    f"product({_OPERANDS}, ScalarType dtype, bool exact) -> Tensor",
    _product_now,
    _product_results,
)
_product_into = operator(
    f"product_into(Tensor(a!) out, {_OPERANDS}, bool accumulate, bool exact) -> ()",
    _product_into_now,
    lambda *_: None,
)


def _as_operator(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    names = [None if x.format is None else x.format.name for x in (a, b)]
    operands = (
        a.codes,
        a.scale,
        a.amax,
        names[0],
        b.codes,
        b.scale,
        b.amax,
        names[1],
        epilogue.bias,
    )
    if epilogue.out is None:
        return _product.call(*operands, epilogue.dtype, epilogue.exact)
    _product_into.call(epilogue.out, *operands, epilogue.accumulate, epilogue.exact)
    return epilogue.out


def _results(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    if epilogue.out is not None:
        return epilogue.out
    return a.codes.new_empty((a.rows, b.rows), dtype=epilogue.dtype)


_OPERATOR = Operator(_as_operator, _results)

TABLE: Table[GemmRequest] = Table(
    "gemm",
    (
        cublaslt.BACKEND,
        cublaslt.BEFORE_BIAS,
        torch_mm.MATMUL,
        torch_mm.TENSOR_SCALES,
        torch_mm.BLOCK_SCALES,
        torch_mm.SWIZZLED_SCALES,
        triton.BACKEND,
        triton.DECODE,
        reference.WIDEN,
        reference.REFERENCE,
    ),
    describe=described,
    operator=lambda request: _OPERATOR,
)

# Backends that multiply decoded values in wider arithmetic than the operands have.
DEQUANTIZING = ("decode", "widen", "reference")


@functools.cache
def multiplies_natively(form: TensorFormat, hardware: Hardware) -> bool:
    """Return whether a backend multiplies two operands in a format on a GPU without dequantizing them."""
    element = torch.uint8 if form.packing == 2 else torch.float8_e4m3fn
    codes, out = MatrixLayout(True, 128 // form.packing), MatrixLayout(True, 128)
    request = GemmRequest(
        form,
        form,
        element,
        element,
        *(128, 128, 128),
        dtype=torch.bfloat16,
        device="cuda",
        hardware=hardware,
        index=0,
        a_layout=codes,
        b_layout=codes,
        out_layout=out,
        bias=None,
        accumulate=False,
        exact=True,
        native=True,
        tf32=False,
    )
    backends = TABLE.candidates(request)
    return (
        next(row.name for row in backends if row.rejection_reason(request) is None)
        not in DEQUANTIZING
    )

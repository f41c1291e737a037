"""GELU, its gradient and FP8 results inside cuBLASLt's product, if the library supports them.

Sources: cuBLAS documentation, cublasLtMatmul, cublasLtMatmulDescAttributes_t and cublasLtEpilogue_t. An
activation's input has the result's dtype, and a row stride divisible by 8 elements. An FP8 result needs FP8
operands with tensor scales, and is E5M2 only if an operand is. With p the float32 product plus bias, the
codes are p times the scale, saturated, and the maximum is max|p|.

Matrices at addresses not divisible by 256 bytes (parts of larger tensors) have a plan for their own alignment, down
to 16 bytes. Below that, or if the library has no algorithm for it, the parts are computed separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend, PlanFailure, always_depends
from ....common.formats import FLOAT8
from ..operand import Operand
from ..quantize import Cast, Quantized, torch_dtype
from . import composed, cublaslt, cublaslt_swizzled
from .composed import CODES, GELU, GELU_GRADIENT, KINDS, FusedRequest
from .cublaslt_plan import Attached, CublasPlan, NoAlgorithm, build_plan
from .cublaslt_problem import ALIGNMENT, CublasProblem
from .request import Epilogue

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_AUX_ROWS = 8  # divisor of an activation input's leading extent, in elements
_LEAST_ALIGNMENT = 16  # bytes; rows of 8 elements of 16 bits keep it, and FP8 products require it


def unsupported_reason(request: FusedRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.forced is not None:
        return request.forced
    reason = cublaslt.unsupported_reason(request.product)
    if reason is None:
        reason = (
            _unsupported_codes(request)
            if request.kind == CODES
            else _unsupported_activation(request)
        )
    return reason


def _unsupported_activation(request: FusedRequest) -> str | None:
    product = request.product
    if product.dtype not in _SIXTEEN_BITS:
        return (
            f"the result is {product.dtype}; the activation's input is saved in bfloat16 or float16"
        )
    if product.a_format not in (None, FLOAT8) and not cublaslt.reads_bytes(product):
        return f"{product.a_format.name} operands; cuBLASLt adds no activation to products of block scales"
    if product.n % _AUX_ROWS:
        return f"N={product.n} is not a multiple of {_AUX_ROWS}, which rows of an activation's input have to be"
    if request.x is None:
        return None
    if product.a_format is not None:
        # [8192, 4096] x [4096, 14336] on an H200: 1.57 ms with fast accumulation and 1.65 without it, where the
        # product takes 0.64 or 0.73 and the kernel after it 0.17.
        return "cuBLASLt's FP8 product with the gradient of GELU takes twice as long as a product and a kernel after it"
    if request.dtype != product.dtype:
        return f"the activation's input is {request.dtype} and the result {product.dtype}; supported: one dtype"
    if not request.x.row_major or request.x.stride == 0 or request.x.stride % _AUX_ROWS:
        return f"the rows of the activation's input are not contiguous or not a multiple of {_AUX_ROWS} apart"
    return None


def _unsupported_codes(request: FusedRequest) -> str | None:
    product = request.product
    if product.a_format != FLOAT8:
        return "FP8 results need FP8 operands with one scale per tensor"
    if request.dtype == torch.float8_e5m2 not in (product.a_element, product.b_element):
        return "an E5M2 result needs an E5M2 operand"
    return None


def fused_problem(request: FusedRequest) -> CublasProblem:
    """Return the product's problem with its activation, or with an FP8 result."""
    problem, product = cublaslt.make_problem(request.product), request.product
    if request.kind == GELU:
        options = {"activation": "GELU_AUX", "aux_leading": product.n} if request.second else {}
        return problem._replace(**{"activation": "GELU", **options})
    if request.kind == GELU_GRADIENT:
        assert request.x is not None
        # Without the row sum that DGELU_BGRAD adds: with it the same product takes 2.11 ms instead of 1.34, and the
        # kernel that sums the rows afterwards 0.09.
        return problem._replace(activation="DGELU", aux_leading=request.x.stride)
    assert request.dtype is not None
    addend = product.dtype if product.dtype in _SIXTEEN_BITS else torch.bfloat16
    return problem._replace(result=request.dtype, addend=addend, amax=request.second)


def bind(request: FusedRequest) -> Callable[..., Any] | PlanFailure:
    """Return a callable with the same arguments as the function for this kind in `composed`."""
    try:
        plan = build_plan(fused_problem(request))
    except NoAlgorithm as error:
        return PlanFailure(str(error))
    return functools.partial(_KINDS[request.kind], plan, request.second)


def _gelu(
    plan: CublasPlan, saves_input: bool, a: Operand, b: Operand, epilogue: Epilogue
) -> tuple[Tensor, Tensor | None]:
    bias = _bias(epilogue)
    aligned = _align_plan(plan, a, b, bias)
    if aligned is None:
        return composed.gelu(saves_input, a, b, epilogue)
    out = torch.empty((plan.problem.n, plan.problem.m), dtype=epilogue.dtype, device=a.codes.device)
    x = torch.empty_like(out) if saves_input else None
    a, b, scalars = cublaslt_swizzled.arguments(aligned.problem, a, b)
    aligned.run_attached(a, b, out, Attached(bias, x), scalars)
    return out, x


def _gelu_gradient(
    plan: CublasPlan, second: bool, a: Operand, b: Operand, epilogue: Epilogue, x: Tensor
) -> Tensor:
    aligned = _align_plan(plan, a, b, x)
    if aligned is None:
        return composed.gelu_gradient(second, a, b, epilogue, x)
    out = torch.empty((plan.problem.n, plan.problem.m), dtype=epilogue.dtype, device=a.codes.device)
    aligned.run_attached(a, b, out, Attached(aux=x))
    return out


def _codes(
    plan: CublasPlan,
    records: bool,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    cast: Cast,
) -> Quantized:
    bias = _bias(epilogue)
    aligned = _align_plan(plan, a, b, bias)
    if aligned is None:
        return composed.codes(records, a, b, epilogue, cast)
    multiplier, record = cast.multiplier, cast.record
    assert multiplier is not None
    shape, dtype = (plan.problem.n, plan.problem.m), torch_dtype(cast.spec.element)
    out = torch.empty(shape, dtype=dtype, device=a.codes.device)
    # "Set to the maximum on completion": zero before, it is the maximum whether the library writes or raises it.
    amax = None if record is None else torch.zeros(1, dtype=torch.float32, device=out.device)
    aligned.run_attached(a, b, out, Attached(bias, None, multiplier, amax))
    if record is not None:
        torch.maximum(record, amax, out=record)  # pyright: ignore[reportArgumentType]
    return Quantized(out, multiplier.to(torch.float32).reciprocal(), amax=record)


_KINDS: dict[str, Callable[..., Any]] = {GELU: _gelu, GELU_GRADIENT: _gelu_gradient, CODES: _codes}


def find_plan(call: Callable[..., Any]) -> CublasPlan | None:
    """Return the plan behind a bound product with GELU, or with its gradient; None for another backend's."""
    if isinstance(call, functools.partial) and call.func in (_gelu, _gelu_gradient):
        return call.args[0]
    return None


def _bias(epilogue: Epilogue) -> Tensor | None:
    """Return the bias as the library reads it: in the result's 16 bits, bfloat16 for a float32 result."""
    bias = epilogue.bias
    if bias is None:
        return None
    dtype = epilogue.dtype if epilogue.dtype in _SIXTEEN_BITS else torch.bfloat16
    return bias if bias.dtype == dtype else bias.to(dtype)


def _align_plan(
    plan: CublasPlan, a: Operand, b: Operand, other: Tensor | None
) -> CublasPlan | None:
    """Return a plan for the alignment of the matrices: this one, another one for less alignment, or None."""
    joined = a.codes.data_ptr() | b.codes.data_ptr()
    if other is not None:
        joined |= other.data_ptr()
    if not joined & (ALIGNMENT - 1):
        return plan
    alignment = joined & -joined
    if alignment < _LEAST_ALIGNMENT:
        return None
    try:
        return build_plan(plan.problem._replace(alignment=alignment))
    except NoAlgorithm:
        return None


BACKEND: Backend[FusedRequest] = Backend(
    "cublaslt",
    takes=KINDS,
    unsupported_reason=unsupported_reason,
    bind=bind,
    opaque=True,
    batch_dependent=always_depends("by an algorithm that is chosen by their number"),
)

"""cuBLASLt products for MXFP8 and NVFP4 codes, whose one-byte scales are swizzled before the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operand import Operand
from . import cublaslt_library as library
from .cublaslt_plan import Attached, CublasPlan, build_plan
from .cublaslt_problem import CublasProblem
from .request import Epilogue
from .swizzle import second_level, swizzle_operand_scale

_ALIGNMENT = 16  # bytes; cuBLASLt has no code products at smaller multiples


def run(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Compute a [M, K] @ b [N, K].T with its epilogue; allocate the result unless epilogue.out is given."""
    problem, out, bias = plan.problem, epilogue.out, epilogue.bias
    if out is None:
        shape = problem.n, problem.m
        out = torch.empty(
            shape, dtype=problem.result, device=library.indexed_device(problem.device)
        )
    if bias is not None and bias.dtype != plan.bias_dtype():
        bias = bias.to(plan.bias_dtype())
    joined = a.codes.data_ptr() | b.codes.data_ptr() | out.data_ptr()
    alignment = min(joined & -joined, problem.alignment)
    if alignment < _ALIGNMENT:
        a, b = a._replace(codes=a.codes.clone()), b._replace(codes=b.codes.clone())
        compact = build_plan(problem._replace(accumulate=False, result_leading=problem.m))
        product = run(compact, a, b, Epilogue(problem.result, bias))
        return epilogue._replace(bias=None, out=out, accumulate=problem.accumulate).store(product)
    if alignment < problem.alignment:
        plan = build_plan(problem._replace(alignment=alignment))
    a, b, scalars = arguments(problem, a, b)
    plan.run_attached(a, b, out, Attached(bias), scalars)
    return out


def arguments(
    problem: CublasProblem, a: Operand, b: Operand
) -> tuple[Operand, Operand, Tensor | None]:
    """Return the operands with scales in the library's order, and alpha and beta if they are in device memory."""
    if not problem.swizzled:
        return a, b, None
    scalars = _scalars(a, b, problem.accumulate) if problem.device_scalars else None
    left, right = (operand._replace(scale=swizzle_operand_scale(operand)) for operand in (a, b))
    return left, right, scalars


def _scalars(a: Operand, b: Operand, accumulates: bool) -> Tensor:
    """Return alpha, the product of both second-level scales, and beta in device memory."""
    left, right = second_level(a), second_level(b)
    assert left is not None and right is not None
    scalars = torch.full((2,), float(accumulates), dtype=torch.float32, device=a.codes.device)
    torch.mul(left, right, out=scalars[:1])
    return scalars

"""Products from dequantized operands: the literal float32 reference for every format, and bfloat16 products on GPUs.

The reference is the oracle for tests and the emulation on a CPU. The backend `widen` multiplies in bfloat16,
which holds 8 significant bits. An FP8 code has at most 4, so FP8 codes and MXFP8 values (a code times a power
of two) are exact; an NVFP4 value is a 2-bit code times a 4-bit E4M3 scale, 6 bits. A per-tensor or per-row
scale is applied to the float32 sum. Scales beyond bfloat16's range (2^-126 to 2^127) are the exception.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import BY_ALGORITHM, Backend, requirements
from ....common.formats import FLOAT8
from ...runtime.autograd import matrix_product
from ..operand import Operand
from ..quantize import dequantize
from . import any_rows
from .cublaslt import multiply_any_rows
from .request import EPILOGUES, Epilogue, GemmRequest


def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """sum_k a[m, k] b[n, k] in float32; one scale for a whole tensor is applied to the sum, block scales before it."""
    product = _multiply_float32(_values(a), _values(b))
    return epilogue.finish(_apply_tensor_scales(product, a, b))


def _run_row_scaled(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """`run` where an operand has a second-level scale per row: both second levels are applied to the sum."""
    product = _multiply_float32(_values(_drop_second_scale(a)), _values(_drop_second_scale(b)))
    return epilogue.finish(_apply_tensor_scales(_with_second_level(product, a, b), a, b))


def _multiply_float32(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [M, K] @ b [N, K].T of float32 values."""
    if requirements.batch_invariant:
        return multiply_any_rows(a, b, torch.float32) if a.is_cuda else any_rows.multiply(a, b.t())
    return matrix_product(a, b.t())


def _apply_tensor_scales(product: Tensor, a: Operand, b: Operand) -> Tensor:
    """Multiply float32 sums by the scales of whole tensors."""
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale
    return product


def _bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    if request.empty:
        return _multiply_empty
    forms = (request.a_format, request.b_format)
    return _run_row_scaled if any(form is not None and form.row_scaled for form in forms) else run


def _has_row_scales(a: Operand, b: Operand) -> bool:
    """Return whether an operand has one second-level scale per row."""
    return any(operand.format is not None and operand.format.row_scaled for operand in (a, b))


def _drop_second_scale(operand: Operand) -> Operand:
    """Return the operand without its second-level scale; the operand itself where the format has none."""
    unit = None if operand.format is None else operand.format.unit_amax
    if unit is None:
        return operand
    assert operand.amax is not None
    return operand._replace(amax=torch.full_like(operand.amax, unit))


def _with_second_level(product: Tensor, a: Operand, b: Operand) -> Tensor:
    """product [M, N], float32, from operands `_drop_second_scale`, times the row maxima of a and b, over their ranges.

    Where one operand has a single maximum, the two are multiplied first and the product by that vector.
    """
    rows = columns = None
    ranges = 1.0
    for operand, is_a in ((a, True), (b, False)):
        unit = None if operand.format is None else operand.format.unit_amax
        if unit is None or operand.amax is None:
            continue
        ranges *= unit
        if is_a:
            rows = operand.amax.view(-1, 1)
        else:
            columns = operand.amax.view(1, -1)
    product = product * (1.0 / ranges)
    if rows is None or columns is None:
        factor = columns if rows is None else rows
        return product if factor is None else product * factor
    both_vary = all(o.format is not None and o.format.row_scaled for o in (a, b))
    return product * rows * columns if both_vary else product * (rows * columns)


def _values(operand: Operand) -> Tensor:
    if operand.format is None or operand.format == FLOAT8:
        return operand.codes.to(torch.float32)
    return dequantize(operand._replace(dtype=torch.float32))


def _multiply_empty(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Return zeros: a sum over no elements is zero, and a result without rows is empty."""
    return epilogue.finish(torch.zeros(a.rows, b.rows, dtype=torch.float32, device=a.codes.device))


def _unsupported_by_widen(request: GemmRequest) -> str | None:
    if request.device != "cuda":
        return f"it is for GPUs; on {request.device} bfloat16 products are not faster than float32"
    if request.empty:
        return "there is nothing to multiply"
    if (reason := request.hardware.lacks("bf16 products")) is not None:
        return reason
    for fmt in (request.a_format, request.b_format):
        if fmt is None:
            return "an operand is not quantized"
        if not (fmt.fits_bfloat16 or request.power_of_two):
            return f"{fmt.name} scales may be any float32; their product with a code needs more bits than bfloat16 has"
    return None


def _run_widened(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Multiply bfloat16 values; per-tensor and per-row scales are applied to the float32 product."""
    a_values, b_values = _codes_in_bfloat16(a), _codes_in_bfloat16(b)
    if requirements.batch_invariant:
        product = multiply_any_rows(a_values, b_values, torch.float32)
    else:
        product = torch.mm(a_values, b_values.t(), out_dtype=torch.float32)
    if _has_row_scales(a, b):
        for operand in (a, b):
            if operand.format is not None and operand.format.unit_amax is None:
                product = product * _tensor_scale(operand)
        return epilogue.finish(_with_second_level(product, a, b))
    return epilogue.finish(product * _tensor_scale(a) * _tensor_scale(b))


def _codes_in_bfloat16(operand: Operand) -> Tensor:
    assert operand.format is not None
    if operand.format.block is None:
        return operand.codes.to(torch.bfloat16)
    return dequantize(_drop_second_scale(operand)._replace(dtype=torch.bfloat16))


def _tensor_scale(operand: Operand) -> Tensor | float:
    assert operand.format is not None
    if operand.format.block is None:
        assert operand.scale is not None
        return operand.scale
    unit = operand.format.unit_amax
    if unit is not None:
        assert operand.amax is not None
        return operand.amax / unit
    return 1.0


def _dependence_of_reference(request: GemmRequest) -> str | None:
    if request.device != "cuda" or request.empty or request.a_format is not None:
        return None
    return BY_ALGORITHM


REFERENCE = Backend(
    "reference", takes=EPILOGUES, bind=_bind, batch_dependent=_dependence_of_reference
)
WIDEN = Backend(
    "widen",
    takes=EPILOGUES,
    unsupported_reason=_unsupported_by_widen,
    bind=lambda request: _run_widened,
)

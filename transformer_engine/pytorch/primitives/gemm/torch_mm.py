"""Products by torch functions: `torch.mm` for unquantized matrices, and `scaled_mm` by cuBLASLt for FP8 codes.

FP8 operands have one scale per tensor or, on Hopper, 1x128 and 128x128 blocks; on Blackwell MXFP8 and NVFP4 operands
have swizzled scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.dispatch import BY_ALGORITHM, Backend, always_depends, requirements
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, SWIZZLED_NAMES, round_up
from ...runtime.autograd import matrix_product
from ...runtime.launching import rows_dense
from ..operand import Operand
from . import any_rows
from .block_scales import BLOCK, align_scale, block_scale, has_row_blocks
from .request import EPILOGUES, Epilogue, GemmRequest
from .swizzle import second_level, swizzle_operand_scale

# cuBLASLt requires 16-byte rows; zero codes added along K add nothing, and zero rows of b are sliced off again.
_ALIGNMENT = 16
# By whether blocks are 1x128: row divisor, and torch.nn.functional.ScalingType name.
_BLOCK_KINDS = {True: (_ALIGNMENT, "BlockWise1x128"), False: (BLOCK, "BlockWise128x128")}


def _unsupported_by_matmul(request: GemmRequest) -> str | None:
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    if request.a_element != request.b_element:
        return f"the operands' dtypes differ ({request.a_element} and {request.b_element})"
    return None


def _product_and_bias(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    assert epilogue.bias is not None
    add = any_rows.multiply_add if requirements.batch_invariant else torch.addmm
    return add(epilogue.bias.to(a.codes.dtype), a.codes, b.codes.t())


def _finish_product(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    a_mk, b_kn, out = a.codes, b.codes.t(), epilogue.out
    result = epilogue.dtype if out is None else out.dtype
    sixteen_bits = a_mk.dtype in (torch.bfloat16, torch.float16)
    if a_mk.is_cuda and epilogue.bias is None and result == torch.float32 and sixteen_bits:
        # The float32 accumulator is the result, without rounding to 16 bits; cuBLAS adds it to `out` itself.
        if out is None:
            return torch.mm(a_mk, b_kn, out_dtype=torch.float32)
        if epilogue.accumulate:
            return torch.addmm(out, a_mk, b_kn, out_dtype=torch.float32, out=out)
        return torch.mm(a_mk, b_kn, out_dtype=torch.float32, out=out)
    multiply = any_rows.multiply if requirements.batch_invariant else matrix_product
    if a_mk.is_cuda or a_mk.dtype == torch.float64:
        return epilogue.finish(multiply(a_mk, b_kn))
    # On a CPU matmul has no output dtype: multiply in float32, so that the result is rounded once.
    return epilogue.finish(multiply(a_mk.float(), b_kn.float()))


def _bind_matmul(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    if request.into or request.dtype != request.a_element:
        return _finish_product
    if request.bias is None:
        multiply = any_rows.multiply if requirements.batch_invariant else matrix_product
        return lambda a, b, epilogue: multiply(a[0], b[0].t())
    return _product_and_bias


def _dependence_of_matmul(request: GemmRequest) -> str | None:
    return BY_ALGORITHM if request.device == "cuda" else None


MATMUL = Backend(
    "matmul",
    takes=EPILOGUES,
    unsupported_reason=_unsupported_by_matmul,
    bind=_bind_matmul,
    batch_dependent=_dependence_of_matmul,
)


def _unsupported_by_both(request: GemmRequest) -> str | None:
    if request.a_format is None or request.b_format is None:
        return "an operand is not quantized"
    if (reason := request.unsupported_on_gpu) is not None:
        return reason
    if request.a_element == request.b_element == torch.float8_e5m2:
        return "cuBLASLt does not multiply two E5M2 operands"
    return None


def _unsupported_tensor_scales(request: GemmRequest) -> str | None:
    if reason := _unsupported_by_both(request):
        return reason
    if request.a_format != FLOAT8 or request.b_format != FLOAT8:
        return f"block scales ({request.a_format.name} x {request.b_format.name}); supported: one scale per tensor"  # pyright: ignore
    return request.hardware.lacks("fp8 products")


def run_tensor_scales(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """Compute the product of two FP8 operands with one scale per tensor, in operations that torch.compile traces."""
    a_codes, b_codes = _pad(a.codes, 1, _ALIGNMENT), _pad(b.codes, _ALIGNMENT, _ALIGNMENT)
    fused = _fuses_bias(b, epilogue)
    assert a.scale is not None and b.scale is not None
    product = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=align_scale(a.scale),
        scale_b=align_scale(b.scale),
        bias=epilogue.bias if fused else None,
        out_dtype=_result_dtype(epilogue),
        use_fast_accum=not epilogue.exact,
    )
    if b_codes.shape[0] != b.rows:
        product = product[:, : b.rows].contiguous()
    return epilogue.store(product) if fused else epilogue.finish(product)


def _unsupported_block_scales(request: GemmRequest) -> str | None:
    if reason := _unsupported_by_both(request):
        return reason
    formats = (request.a_format, request.b_format)
    if any(fmt not in (BLOCK_1D, BLOCK_2D) for fmt in formats):
        return f"{formats[0].name} x {formats[1].name}; supported: 1x128 and 128x128 blocks"  # pyright: ignore
    if formats == (BLOCK_2D, BLOCK_2D):
        return "cuBLASLt does not multiply two operands of 128x128 blocks"
    if torch.float8_e5m2 in (request.a_element, request.b_element):
        return "torch.nn.functional.scaled_mm does not support E5M2 operands in a product of blocks"
    if (reason := request.hardware.lacks("fp8 block products")) is not None:
        return reason
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (it came with 2.10)"
    return None


def _run_block_scales(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    a_kind, b_kind = (_BLOCK_KINDS[has_row_blocks(x.format)] for x in (a, b))
    a_codes, b_codes = _pad(a.codes, a_kind[0], BLOCK), _pad(b.codes, b_kind[0], BLOCK)
    fused = _fuses_bias(b, epilogue) and b_codes.shape[0] == b.rows
    product = F.scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=block_scale(a, a_codes),
        scale_recipe_a=getattr(F.ScalingType, a_kind[1]),
        scale_b=block_scale(b, b_codes),
        scale_recipe_b=getattr(F.ScalingType, b_kind[1]),
        bias=epilogue.bias if fused else None,
        output_dtype=_result_dtype(epilogue),
        use_fast_accum=False,
    )
    if a_codes.shape[0] != a.rows or b_codes.shape[0] != b.rows:
        # Every backend returns a contiguous result.
        product = product[: a.rows, : b.rows].contiguous()
    return epilogue.store(product) if fused else epilogue.finish(product)


def _unsupported_swizzled_scales(request: GemmRequest) -> str | None:
    if reason := _unsupported_by_both(request):
        return reason
    needs = request.scaled_products
    if needs is None:
        return f"it takes two operands of one format, {SWIZZLED_NAMES}, or blocks whose scales are powers of two"
    if (reason := request.hardware.lacks(needs)) is not None:
        return reason
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (it came with 2.10)"
    for form in (request.a_format, request.b_format):
        if form is not None and form.row_scaled:
            return (
                "a second-level scale per row; torch.nn.functional.scaled_mm takes one per tensor"
            )
    if request.k % 32 or request.n % _ALIGNMENT:
        return f"K={request.k} is not a multiple of 32, or N={request.n} not of {_ALIGNMENT}"
    return None


def _run_swizzled_scales(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    # cuBLASLt rejects a bias on some GPUs if the operands have two scale levels.
    one_level = b.format is not None and b.format.levels is None
    fused = one_level and _fuses_bias(b, epilogue)
    scales, kinds, swizzles = zip(*map(_swizzled_operands, (a, b)), strict=True)
    elements = [
        torch.float4_e2m1fn_x2 if x.codes.dtype == torch.uint8 else x.codes.dtype for x in (a, b)
    ]
    product = F.scaled_mm(
        rows_dense(a.codes).view(elements[0]),
        rows_dense(b.codes).view(elements[1]).t(),
        scale_a=scales[0],
        scale_recipe_a=kinds[0],
        scale_b=scales[1],
        scale_recipe_b=kinds[1],
        swizzle_a=swizzles[0],
        swizzle_b=swizzles[1],
        bias=epilogue.bias if fused else None,
        output_dtype=_result_dtype(epilogue),
    )
    return epilogue.store(product) if fused else epilogue.finish(product)


def _swizzled_operands(
    operand: Operand,
) -> tuple[list[Tensor], list[F.ScalingType], list[F.SwizzleType]]:
    """Return the scales, their kinds and their orders, as torch.nn.functional.scaled_mm takes them."""
    scales, level = swizzle_operand_scale(operand), second_level(operand)
    if level is None:
        kinds = [F.ScalingType.BlockWise1x32]
        return [scales.view(torch.float8_e8m0fnu)], kinds, [F.SwizzleType.SWIZZLE_32_4_4]
    return (
        [scales.view(torch.float8_e4m3fn), level],
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],
    )


def _pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Pad codes with zeros to multiples of rows and columns, contiguous along K; return the codes where they fit."""
    height, width = codes.shape
    if height % rows or width % columns:
        extra_rows, extra_columns = (
            round_up(height, rows) - height,
            round_up(width, columns) - width,
        )
        return F.pad(codes.view(torch.uint8), (0, extra_columns, 0, extra_rows)).view(codes.dtype)
    return codes if codes.stride(1) == 1 else codes.contiguous()


def _result_dtype(epilogue: Epilogue) -> torch.dtype:
    dtype = epilogue.dtype if epilogue.out is None else epilogue.out.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32


def _fuses_bias(b: Operand, epilogue: Epilogue) -> bool:
    bias = epilogue.bias
    return (
        bias is not None
        and bias.dtype == _result_dtype(epilogue)
        and bias.dtype in (torch.bfloat16, torch.float16)
        and b.rows % _ALIGNMENT == 0
    )


def _backend(name: str, unsupported_reason: Any, run: Any, opaque: bool = False) -> Backend:
    return Backend(
        name,
        takes=EPILOGUES,
        unsupported_reason=unsupported_reason,
        bind=lambda request: run,
        opaque=opaque,
        batch_dependent=always_depends(BY_ALGORITHM),
    )


TENSOR_SCALES = _backend("scaled_mm", _unsupported_tensor_scales, run_tensor_scales)
# torch 2.11 cannot trace F.scaled_mm.
BLOCK_SCALES = _backend(
    "scaled_mm_block", _unsupported_block_scales, _run_block_scales, opaque=True
)
SWIZZLED_SCALES = _backend(
    "scaled_mm_swizzled", _unsupported_swizzled_scales, _run_swizzled_scales, opaque=True
)

"""FP8 products by cuBLASLt, reached through torch: one scale a tensor, or 1x128 and 128x128 blocks on Hopper."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, round_up
from ..operand import Operand
from .block_scales import BLOCK, aligned_scale, block_scale
from .request import EPILOGUES, Epilogue, GemmRequest

# cuBLASLt wants 16-byte rows; zero codes added to K add nothing, zero rows of b are cut off again.
_ALIGNMENT = 16


def _refuses_anywhere(request: GemmRequest) -> str | None:
    if request.a_format is None or request.b_format is None:
        return "an operand is not quantized"
    if request.device != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device}"
    if request.empty:
        return "there is nothing to multiply"
    if request.a_element == request.b_element == torch.float8_e5m2:
        return "cuBLASLt multiplies no two E5M2 operands"
    return None


def _refuses_tensor_scales(request: GemmRequest) -> str | None:
    if reason := _refuses_anywhere(request):
        return reason
    if request.a_format != FLOAT8 or request.b_format != FLOAT8:
        return (
            f"block scales ({request.a_format.name} x {request.b_format.name}); it takes one scale a tensor"  # pyright: ignore
        )
    if request.capability < (8, 9):
        return f"compute capability {request.capability[0]}.{request.capability[1]} < 8.9 has no FP8 tensor cores"
    return None


def _run_tensor_scales(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    a_codes, b_codes = _pad(a.codes, 1, _ALIGNMENT), _pad(b.codes, _ALIGNMENT, _ALIGNMENT)
    fused = _fuses_bias(b, epilogue)
    assert a.scale is not None and b.scale is not None
    product = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=aligned_scale(a.scale),
        scale_b=aligned_scale(b.scale),
        bias=epilogue.bias if fused else None,
        out_dtype=_result_dtype(epilogue),
        use_fast_accum=not epilogue.exact,
    )
    if b_codes.shape[0] != b.rows:
        product = product[:, : b.rows].contiguous()
    return epilogue.store(product) if fused else epilogue.finish(product)


def _refuses_block_scales(request: GemmRequest) -> str | None:
    if reason := _refuses_anywhere(request):
        return reason
    formats = (request.a_format, request.b_format)
    if any(fmt not in (BLOCK_1D, BLOCK_2D) for fmt in formats):
        return f"{formats[0].name} x {formats[1].name}; it takes 1x128 and 128x128 blocks"  # pyright: ignore
    if formats == (BLOCK_2D, BLOCK_2D):
        return "cuBLASLt multiplies no two operands of 128x128 blocks"
    if torch.float8_e5m2 in (request.a_element, request.b_element):
        return "torch.nn.functional.scaled_mm takes no E5M2 operand in a product of blocks"
    if request.capability[0] != 9:
        return (
            f"compute capability {request.capability[0]}.{request.capability[1]}; cuBLASLt has it on 9.0 only"
        )
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (it came with 2.10)"
    return None


def _run_block_scales(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    assert a.format is not None and b.format is not None
    row_unit = {BLOCK_1D: _ALIGNMENT, BLOCK_2D: BLOCK}
    a_codes = _pad(a.codes, row_unit[a.format], BLOCK)
    b_codes = _pad(b.codes, row_unit[b.format], BLOCK)
    fused = _fuses_bias(b, epilogue) and b_codes.shape[0] == b.rows
    product = _block_product(
        a_codes,
        b_codes,
        block_scale(a, a_codes),
        block_scale(b, b_codes),
        a.format == BLOCK_2D,
        b.format == BLOCK_2D,
        _result_dtype(epilogue),
        epilogue.bias if fused else None,
    )
    if a_codes.shape[0] != a.rows or b_codes.shape[0] != b.rows:
        # A result has the strides of its shape, as every other backend's: what reads it need not ask.
        product = product[: a.rows, : b.rows].contiguous()
    return epilogue.store(product) if fused else epilogue.finish(product)


def _block_product(
    a_codes: Tensor,
    b_codes: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_square: bool,
    b_square: bool,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """a [M, K] @ b [N, K].T + bias [N] in dtype; 128x128 scales where square, else 1x128."""
    kinds = {False: F.ScalingType.BlockWise1x128, True: F.ScalingType.BlockWise128x128}
    return F.scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a=a_scale,
        scale_recipe_a=kinds[a_square],
        scale_b=b_scale,
        scale_recipe_b=kinds[b_square],
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=False,
    )


def _pad(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Zero codes up to multiples of rows and columns, contiguous along K; the codes themselves where they fit."""
    height, width = codes.shape
    if height % rows or width % columns:
        extra_rows, extra_columns = round_up(height, rows) - height, round_up(width, columns) - width
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


def _bind_tensor_scales(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return _run_tensor_scales


def _bind_block_scales(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return _run_block_scales


TENSOR_SCALES = Backend(
    "scaled_mm", takes=EPILOGUES, refuses=_refuses_tensor_scales, bind=_bind_tensor_scales
)
# torch 2.11 cannot trace F.scaled_mm.
BLOCK_SCALES = Backend(
    "scaled_mm_block", takes=EPILOGUES, refuses=_refuses_block_scales, bind=_bind_block_scales, opaque=True
)

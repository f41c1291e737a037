"""A grouped product as a loop over cuBLAS calls that write their part of the result, bit-equal to single products.

It accepts few groups of any size, which so stay bit-equal to single products, and more groups only if each product
takes longer on the GPU than its launch on the host, 12 us unquantized and 25 us in FP8. H200, 8 groups of 2048 x
4096 x 2048, TFLOP/s of forward, input and weight gradient: bfloat16 724, 747, 725 (Triton 713, 704, 712),
e4m3 1214, 1239, 1101 (Triton 1174, 997, 949), but 1.83 ms host time per step against 1.05. With 64 groups of
512 x 1408 x 2048 the bfloat16 products run at 323 TFLOP/s, against 641.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.dispatch import BY_ALGORITHM, Backend, always_depends
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ...runtime.device import current_hardware
from ..gemm.block_scales import block_scale, has_row_blocks
from ..operand import Operand
from .pieces import iterate_operands
from .request import GroupedGemmRequest, GroupedMatrices, GroupedProduct

FEW = 6  # groups
_LARGE = 1 << 33  # multiplications per group: 22 us in bfloat16 on an H200
_LARGE_QUANTIZED = 1 << 35  # 55 us in FP8
_HALVES = (torch.bfloat16, torch.float16)


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device.type}"
    if not request.rows_known:
        return "the host does not know the groups' rows"
    if request.clears:
        return "rows of no group are cleared, which its products leave undefined"
    large = _LARGE if request.a_format is None else _LARGE_QUANTIZED
    work = request.rows * request.n * request.k // request.groups
    if request.groups > FEW and work < large:
        return f"{request.groups} groups of {work:.1e} multiplications; it takes {FEW} groups, or {large:.1e} each"
    if request.tiled:
        return "the codes of columns are tiles; it multiplies one contiguous matrix per group"
    if request.a_element not in _HALVES and request.a_format is None:
        return f"unquantized operands are {request.a_element}; it takes bfloat16 and float16"
    if request.a_format is None and request.b_format is None:
        return None if request.a_element == request.b_element else "the operands' dtypes differ"
    formats = (request.a_format, request.b_format)
    if request.a_element == request.b_element == torch.float8_e5m2:
        return "cuBLASLt does not multiply two E5M2 operands"
    if request.a_format != FLOAT8 and torch.float8_e5m2 in (request.a_element, request.b_element):
        return "cuBLASLt supports block scales for E4M3 only"
    if not request.fits or request.n % 16 or request.k % 16:
        return "a group's rows, or another extent, is not a multiple of 16"
    if formats == (FLOAT8, FLOAT8):
        return current_hardware().lacks("fp8 products")
    if formats not in ((BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D)):
        return "it takes one scale per tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    if (reason := current_hardware().lacks("fp8 block products")) is not None:
        return reason
    if request.n % 128 or request.k % 128:
        return "with block scales it takes multiples of 128"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (it came with 2.10)"
    return None


def _bind(request: GroupedGemmRequest) -> Callable[[GroupedProduct], None]:
    multiply = {None: _plain, FLOAT8: _tensor_scales}.get(request.a_format, _block_scales)
    return functools.partial(_each, multiply)


def _each(multiply: Callable[..., None], product: GroupedProduct) -> None:
    along_columns = isinstance(product.b, GroupedMatrices)
    biases = [None] * product.groups.count if product.bias is None else product.bias.unbind(0)
    for bias, (rows, a, b, out) in zip(biases, iterate_operands(product), strict=True):
        if rows:
            multiply(a, b, out, bias, product.accumulate, product.exact)
        elif not along_columns and not product.accumulate:
            out.zero_()


def _plain(
    a: Operand, b: Operand, out: Tensor, bias: Tensor | None, accumulate: bool, exact: bool
) -> None:
    same = out.dtype == a.codes.dtype
    if bias is not None:
        torch.addmm(bias.to(a.codes.dtype), a.codes, b.codes.t(), out=out)
    elif same and not accumulate:
        torch.mm(a.codes, b.codes.t(), out=out)
    elif out.dtype != torch.float32:
        product = torch.mm(a.codes, b.codes.t())
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        torch.addmm(out, a.codes, b.codes.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.codes, b.codes.t(), out_dtype=torch.float32, out=out)


def _tensor_scales(
    a: Operand, b: Operand, out: Tensor, bias: Tensor | None, accumulate: bool, exact: bool
) -> None:
    assert a.scale is not None and b.scale is not None
    target = torch.empty_like(out) if accumulate else out
    torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scale.view(()),
        scale_b=b.scale.view(()),
        bias=None if bias is None else bias.to(out.dtype),
        out_dtype=out.dtype,
        use_fast_accum=not exact,
        out=target,
    )
    if accumulate:
        out.add_(target)


def _block_scales(
    a: Operand, b: Operand, out: Tensor, bias: Tensor | None, accumulate: bool, exact: bool
) -> None:
    target = torch.empty_like(out) if accumulate else out
    torch.ops.aten._scaled_mm_v2.out(
        a.codes,
        b.codes.t(),
        [block_scale(a, a.codes)],
        [_kind(a)],
        [0],
        [block_scale(b, b.codes)],
        [_kind(b)],
        [0],
        None if bias is None else bias.to(out.dtype),
        out.dtype,
        [],
        False,
        out=target,
    )
    if accumulate:
        out.add_(target)


def _kind(operand: Operand) -> int:
    kinds = F.ScalingType
    return (
        kinds.BlockWise1x128 if has_row_blocks(operand.format) else kinds.BlockWise128x128
    ).value


BACKEND: Backend[GroupedGemmRequest] = Backend(
    "library",
    unsupported_reason=unsupported_reason,
    bind=_bind,
    batch_dependent=always_depends(BY_ALGORITHM),
)

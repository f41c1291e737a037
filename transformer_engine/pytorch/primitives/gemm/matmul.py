"""Products of unquantized matrices by torch.matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..operand import Operand
from .request import Epilogue, GemmRequest


def refuses(request: GemmRequest) -> str | None:
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    if request.a_element != request.b_element:
        return f"the operands' dtypes differ ({request.a_element} and {request.b_element})"
    return None


def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    a_mk, b_kn = a.codes, b.codes.t()
    same_dtype = a_mk.dtype == epilogue.dtype and epilogue.out is None
    if same_dtype and epilogue.bias is not None:
        return torch.addmm(epilogue.bias.to(a_mk.dtype), a_mk, b_kn)
    if same_dtype:
        return torch.mm(a_mk, b_kn)
    if a_mk.is_cuda and epilogue.bias is None and _wants_float32(a_mk, epilogue):
        return _float32_result(a_mk, b_kn, epilogue)
    return epilogue.finish(_widened(a_mk, b_kn))


def _wants_float32(a_mk: Tensor, epilogue: Epilogue) -> bool:
    result = epilogue.dtype if epilogue.out is None else epilogue.out.dtype
    return result == torch.float32 and a_mk.dtype in (torch.bfloat16, torch.float16)


def _float32_result(a_mk: Tensor, b_kn: Tensor, epilogue: Epilogue) -> Tensor:
    """The float32 accumulator as it is, without a round trip through 16 bits; cuBLAS adds it to `out` itself."""
    if epilogue.out is None:
        return torch.mm(a_mk, b_kn, out_dtype=torch.float32)
    if epilogue.accumulate:
        return torch.addmm(epilogue.out, a_mk, b_kn, out_dtype=torch.float32, out=epilogue.out)
    return torch.mm(a_mk, b_kn, out_dtype=torch.float32, out=epilogue.out)


def _widened(a_mk: Tensor, b_kn: Tensor) -> Tensor:
    """The product in the operands' dtype on a GPU; float32 or wider on a CPU, where matmul has no output dtype."""
    if a_mk.is_cuda:
        return torch.mm(a_mk, b_kn)
    return torch.mm(a_mk.float(), b_kn.float()) if a_mk.dtype != torch.float64 else torch.mm(a_mk, b_kn)


BACKEND = Backend("matmul", run, refuses)

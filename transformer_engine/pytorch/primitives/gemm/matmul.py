"""Products of unquantized matrices by torch.matmul."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..operand import Operand
from .request import EPILOGUES, Epilogue, GemmRequest


def refuses(request: GemmRequest) -> str | None:
    if request.a_format is not None or request.b_format is not None:
        return "an operand is quantized"
    if request.a_element != request.b_element:
        return f"the operands' dtypes differ ({request.a_element} and {request.b_element})"
    return None


def _product(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    return torch.mm(a[0], b[0].t())


def _product_and_bias(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    assert epilogue.bias is not None
    return torch.addmm(epilogue.bias.to(a.codes.dtype), a.codes, b.codes.t())


def _finished(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    a_mk, b_kn = a.codes, b.codes.t()
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


def _bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    if request.into or request.dtype != request.a_element:
        return _finished
    return _product if request.bias is None else _product_and_bias


BACKEND = Backend("matmul", takes=EPILOGUES, refuses=refuses, bind=_bind)

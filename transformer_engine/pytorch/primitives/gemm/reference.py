"""The literal product in float32, for every format and device: the oracle, and the emulation on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT8
from ..operand import Operand
from ..quantize import dequantize
from .request import EPILOGUES, Epilogue, GemmRequest


def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """sum_k a[m, k] b[n, k] in float32; one scale for a whole tensor is applied to the sum, block scales before it."""
    product = torch.mm(_values(a), _values(b).t())
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale
    return epilogue.finish(product)


def _values(operand: Operand) -> Tensor:
    if operand.format is None or operand.format == FLOAT8:
        return operand.codes.to(torch.float32)
    return dequantize(operand._replace(dtype=torch.float32))


def _nothing_to_multiply(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """A sum over no elements is zero; a result without rows is empty."""
    return epilogue.finish(torch.zeros(a.rows, b.rows, dtype=torch.float32, device=a.codes.device))


def _bind(request: GemmRequest) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    return _nothing_to_multiply if request.empty else run


BACKEND = Backend("reference", takes=EPILOGUES, bind=_bind)

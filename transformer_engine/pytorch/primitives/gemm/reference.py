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
    """sum_k a[m, k] b[n, k] in float32; one scale for a whole tensor is applied to the sum, block scales before it.

    Where an operand has a second-level scale per row, the second level of both is applied to the sum.
    """
    if has_row_scales(a, b):
        product = torch.mm(_first_level(a), _first_level(b).t())
        product = with_second_level(product, a, b)
    else:
        product = torch.mm(_values(a), _values(b).t())
    for operand in (a, b):
        if operand.format == FLOAT8:
            assert operand.scale is not None
            product = product * operand.scale
    return epilogue.finish(product)


def has_row_scales(a: Operand, b: Operand) -> bool:
    """Return whether an operand has a second-level scale for each of its rows."""
    return any(operand.format is not None and operand.format.row_scaled for operand in (a, b))


def at_unit_amax(operand: Operand) -> Operand:
    """The operand with its second-level scale left out; itself where the format has none."""
    unit = None if operand.format is None else operand.format.unit_amax
    if unit is None:
        return operand
    assert operand.amax is not None
    return operand._replace(amax=torch.full_like(operand.amax, unit))


def with_second_level(product: Tensor, a: Operand, b: Operand) -> Tensor:
    """product [M, N], float32, of operands `at_unit_amax`, times the maxima of a's rows and of b's, over their ranges.

    Where one of the operands has a single maximum, the two are multiplied first and the product by that vector.
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


def _first_level(operand: Operand) -> Tensor:
    return _values(at_unit_amax(operand))


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

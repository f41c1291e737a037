"""Operands through save_for_backward: tensors in one flat list, and what puts them together again beside it.

A backward that has read what its node saved may be the last to hold it, and makes room by letting go piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives.operand import Operand
from ..tensor.custom_operand import CustomOperand
from ..tensor.quantizer import Matrix

Saved = Operand | Matrix | None


def pack(*operands: Saved) -> tuple[list[Tensor | None], list[Any]]:
    """All tensors of the operands in order, and for each operand what is no tensor: its form."""
    tensors: list[Tensor | None] = []
    forms: list[Any] = []
    for operand in operands:
        if operand is None:
            forms.append(None)
        elif isinstance(operand, Matrix):
            tensors.append(operand.values)
            forms.append(())
        elif isinstance(operand, CustomOperand):
            parts, together = operand.take_apart()
            tensors += parts
            forms.append(together)
        else:
            codes, scale, tensor_format, amax, dtype = operand
            tensors += (codes, scale, amax)
            forms.append((tensor_format, dtype))
    return tensors, forms


def take_saved(ctx: Any) -> tuple[Any, ...]:
    """ctx.saved_tensors, which the node itself lets go of unless its graph is kept for another backward.

    torch drops them when the node's backward has returned, with all that it allocated still there; a backward that
    calls this decides itself when each of them goes. With retain_graph=True, or called by hand, the node keeps them.
    """
    tensors = ctx.saved_tensors
    if not torch.compiler.is_compiling():  # a compiler plans memory itself, and traces no such call
        ctx.maybe_clear_saved_tensors()
    return tensors


def unpack(tensors: Sequence[Tensor | None], forms: list[Any]) -> list[Any]:
    """The operands that `pack` took apart."""
    operands: list[Any] = []
    start = 0
    for form in forms:
        if form is None:
            operands.append(None)
        elif not form:
            operands.append(Matrix(tensors[start]))  # pyright: ignore[reportArgumentType]
            start += 1
        elif isinstance(form, tuple):
            codes, scale, amax = tensors[start : start + 3]
            operands.append(Operand(codes, scale, form[0], amax, form[1]))  # pyright: ignore[reportArgumentType]
            start += 3
        else:
            operand, taken = form(list(tensors[start:]))
            operands.append(operand)
            start += taken
    return operands

"""sums [N] of the columns of a matrix [M, N], made in float32 (float64 of float64): the gradient of a bias."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from ..quantize import Cast, Quantized
from . import reference, triton
from .reference import ColumnSumsRequest, request_of

__all__ = ["TABLE", "ColumnSumsRequest", "column_sums"]


@overload
def column_sums(x: Tensor, dtype: torch.dtype, cast: None = None) -> Tensor: ...


@overload
def column_sums(x: Tensor, dtype: torch.dtype, cast: Cast) -> tuple[Quantized, Tensor]: ...


def column_sums(x: Tensor, dtype: torch.dtype, cast: Cast | None = None) -> Tensor | tuple[Quantized, Tensor]:
    """[N] = the sum over the rows of x [M, N], in float32, in an order of the backend's, and at the end as dtype.

    With a cast, (the codes of x that it asks for, the sum): on a GPU they come out of passes that x takes anyway. A
    given multiplier, or one a block: the cast makes the sums; one scale made from x: the pass that finds max|x|.
    """
    facts = (x.shape, x.stride(), x.dtype, dtype, x.device)
    if cast is None:
        return TABLE.bound(facts)(x)
    spec, multiplier, record = cast
    return TABLE.bound((*facts, spec, multiplier is not None, record is not None))(x, multiplier, record)


def _results(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


_operator = operator("column_sums(Tensor x, ScalarType dtype) -> Tensor", column_sums, _results)


def _operator_of(request: ColumnSumsRequest) -> Operator:
    """Of the sums alone: a cast beside them is an operator of its own."""
    sums = _operator.given(dtype=request.result)
    if request.cast is None:
        return sums
    return Operator(*(reference.beside_cast(request, part) for part in sums))


TABLE: Table[ColumnSumsRequest] = Table(
    "column_sums", (triton.BACKEND, reference.BACKEND), describe=request_of, operator=_operator_of
)

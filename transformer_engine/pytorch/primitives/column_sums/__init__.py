"""column sums [N] of a matrix [M, N] in float32 (float64 for float64): a bias gradient."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from ..quantize import Cast, Quantized
from . import reference, triton
from .reference import ColumnSumsRequest, make_request

__all__ = ["TABLE", "ColumnSumsRequest", "column_sums"]


@overload
def column_sums(x: Tensor, dtype: torch.dtype, cast: None = None) -> Tensor: ...


@overload
def column_sums(x: Tensor, dtype: torch.dtype, cast: Cast) -> tuple[Quantized, Tensor]: ...


def column_sums(
    x: Tensor, dtype: torch.dtype, cast: Cast | None = None
) -> Tensor | tuple[Quantized, Tensor]:
    """Sum x [M, N] over its rows: [N] in dtype, accumulated in float32 in an order that depends on the backend.

    With a cast, return (codes of x, sums). On a GPU the passes of the cast compute both: the cast itself where it
    is given a multiplier or computes one per block, the pass that finds max|x| where one scale is computed from x.
    """
    facts = (x.shape, x.stride(), x.dtype, dtype, x.device)
    if cast is None:
        return TABLE.bound(facts)(x)
    spec, multiplier, record = cast
    return TABLE.bound((*facts, spec, multiplier is not None, record is not None))(
        x, multiplier, record
    )


_operator = operator(
    "column_sums(Tensor x, ScalarType dtype) -> Tensor",
    column_sums,
    lambda x, dtype: x.new_empty(x.shape[1], dtype=dtype),
)


def _make_operator(request: ColumnSumsRequest) -> Operator:
    """Return the operator of the sums; a cast is a separate operator."""
    sums = _operator.given(dtype=request.result)
    if request.cast is None:
        return sums
    return Operator(*(reference.with_cast(request, part) for part in sums))


TABLE: Table[ColumnSumsRequest] = Table(
    "column_sums",
    (triton.BACKEND, reference.BACKEND),
    describe=make_request,
    operator=_make_operator,
)

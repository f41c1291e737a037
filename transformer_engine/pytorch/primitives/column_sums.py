"""sums [N] of the columns of a matrix [M, N], made in float32 (float64 of float64): the gradient of a bias."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...common.dispatch import Backend, Table
from .launching import DTYPE_NAMES, perform, refuses_elementwise, rows_dense, run, traceable

if TYPE_CHECKING:
    from ...common.kernels.launch import Launch
    from ...common.kernels.program import Program

_LIMIT = 1 << 24  # offsets inside a tile are 32-bit integers


class ColumnSumsRequest(NamedTuple):
    """One call on a matrix."""

    shape: tuple[int, int]
    dtype: torch.dtype
    result: torch.dtype
    device: torch.device


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] = the sum over the rows of x [M, N], in float32, in an order of the backend's, and at the end as dtype."""

    def describe() -> ColumnSumsRequest:
        return ColumnSumsRequest((x.shape[0], x.shape[1]), x.dtype, dtype, x.device)

    if torch.compiler.is_compiling():
        return TABLE.select(describe()).run(x, dtype)
    return TABLE.choice((x.shape, x.dtype, dtype, x.device), describe).run(x, dtype)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] = the sum over the first axis of a kernel's float32 sums [strips, N], on a GPU."""
    return run(_sum_launch(partials.shape, dtype), (partials,))[0]


def _reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)


def _in_strips(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of strips of rows, then their sum: torch's takes 128 MiB of scratch memory at 4096 x 4096."""
    x = rows_dense(x) if x.stride(0) < _LIMIT else x.contiguous()
    return perform(_program((x.shape[0], x.shape[1]), x.stride(0), dtype), (x,))[0]


def _refuses(request: ColumnSumsRequest) -> str | None:
    if (reason := refuses_elementwise(request.device, request.dtype, request.result)) is not None:
        return reason
    if 0 in request.shape:
        return f"{list(request.shape)} has no elements"
    if max(request.shape) >= _LIMIT:
        return f"an extent of {list(request.shape)} reaches {_LIMIT}"
    return None


def _takes_all(request: ColumnSumsRequest) -> None:
    return None


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


@functools.lru_cache(maxsize=1024)
def _program(shape: tuple[int, int], stride: int, dtype: torch.dtype) -> Program:
    from ...common.kernels import column_sums as kernels  # it imports triton

    return kernels.sums(shape, stride, DTYPE_NAMES[dtype])


@functools.lru_cache(maxsize=1024)
def _sum_launch(partials: torch.Size, dtype: torch.dtype) -> Launch:
    from ...common.kernels import activation_cast  # it imports triton

    return activation_cast.sum_columns((partials[0], partials[1]), DTYPE_NAMES[dtype])


_traceable = traceable("column_sums(Tensor x, ScalarType dtype) -> Tensor", _in_strips, _empty)

TABLE: Table[ColumnSumsRequest] = Table(
    "column_sums", (Backend("triton", _traceable, _refuses), Backend("reference", _reference, _takes_all))
)

"""A grouped product in one launch of a Triton kernel, whatever the sizes of the groups."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ....common.kernels import launch
from ..launching import processors
from .groups import Matrices
from .request import GroupedColumns, GroupedGemmRequest, GroupedMatrices, GroupedProduct, GroupedRows

_HALVES = (torch.bfloat16, torch.float16)
_RESULTS = (*_HALVES, torch.float32)


def refuses(request: GroupedGemmRequest) -> str | None:
    if request.device != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device}"
    if (reason := launch.missing()) is not None:
        return reason
    if torch.version.hip is not None:
        return "its tiles are for NVIDIA's tensor cores, this torch is built for ROCm"
    formats = (request.a_format, request.b_format)
    if formats == (None, None):
        if request.a_element not in _HALVES or request.a_element != request.b_element:
            return (
                f"it takes two bfloat16 or float16 operands, not {request.a_element} and {request.b_element}"
            )
        if request.capability < (8, 0):
            return "compute capability < 8.0 has no bfloat16 tensor cores"
    elif formats == (FLOAT8, FLOAT8):
        if request.capability < (8, 9):
            return "compute capability < 8.9 has no FP8 tensor cores"
    elif formats not in ((BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D)):
        return "it takes one scale a tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    elif request.capability < (8, 9):
        return "compute capability < 8.9 has no FP8 tensor cores"
    if request.n % 16 or request.k % 16:
        return f"N={request.n} or K={request.k} is not a multiple of 16"
    if request.result not in _RESULTS:
        return f"the result is {request.result}; it writes bfloat16, float16 and float32"
    return None


def run(product: GroupedProduct) -> None:
    device = product.a.codes.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(product, device)
    else:
        _start(product, device)


def _start(product: GroupedProduct, device: int) -> None:
    if isinstance(product.b, GroupedMatrices):
        _of_rows(product, product.b, device)
    else:
        _of_columns(product, product.b, device)


def _of_rows(product: GroupedProduct, b: GroupedMatrices, device: int) -> None:
    a, groups = product.a, product.groups
    assert isinstance(a, GroupedRows) and isinstance(product.out, Tensor)
    n, k = product.extents
    matrix, table = (b.codes, None) if b.matrices is None else (b.matrices.tensors[0], b.matrices.table)
    record = _kernels().product_of_rows(
        groups.total,
        n,
        k,
        groups.count,
        scaling=_scaling(a),
        exact=product.exact and a.format == FLOAT8,
        transposed=b.transposed,
        by_address=table is not None,
        shared_memory=processors(device).shared_memory,
    )
    inputs = (a.codes, matrix, table, a.scale, b.scale, product.bias, groups.layout)
    launch.start(record, (*inputs, product.out), device)


def _of_columns(product: GroupedProduct, b: GroupedColumns, device: int) -> None:
    a, groups, out = product.a, product.groups, product.out
    n, k = product.extents
    record = _kernels().product_of_columns(
        n,
        k,
        groups.count,
        scaling=_scaling(a),
        exact=product.exact and a.format == FLOAT8,
        accumulates=product.accumulate,
        by_address=not isinstance(out, Tensor),
        shared_memory=processors(device).shared_memory,
    )
    table = None if isinstance(out, Tensor) else Matrices.of(out).table
    first = out if isinstance(out, Tensor) else out[0]
    launch.start(record, (a.codes, b.codes, a.scale, b.scale, groups.layout, table, first), device)


def _scaling(a: GroupedRows | GroupedColumns) -> int:
    kernels = _kernels()
    if a.format is None:
        return kernels.UNSCALED
    return kernels.TENSOR_SCALES if a.format == FLOAT8 else kernels.BLOCK_SCALES


@functools.cache
def _kernels() -> ModuleType:
    """The kernel file, which imports triton."""
    from ....common.kernels import grouped_gemm

    return grouped_gemm


BACKEND = Backend[GroupedGemmRequest]("triton", run, refuses)

"""codes [M, F] of f(x), codes [M, N] of dx or of dy itself, their transposes and column sums: one kernel on a GPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import fused_codes
from ..launching import DTYPE_NAMES, rows_dense, run
from ..quantize import Quantized, QuantizeSpec
from .request import ACTIVATIONS, ActivationParams

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch

_LIMIT = 1 << 24  # offsets inside a tile of 64 rows are 32-bit integers
_NO_CONSTANTS = (0.0, 0.0, 0.0)


def fuses(x: Tensor, halves: bool, spec: QuantizeSpec, scale: Tensor | None) -> bool:
    """Can the result, [M, F] of x [M, 2F] if it halves the columns, be quantized where it is made?"""
    if x.dim() != 2 or max(x.shape[1], x.stride(0)) >= _LIMIT:
        return False
    shape = (x.shape[0], x.shape[1] // 2 if halves else x.shape[1])
    return fused_codes.fuses(shape, x.dtype, x.device, spec, scale is not None)


def forward(
    name: str,
    x: Tensor,
    params: ActivationParams,
    spec: QuantizeSpec,
    scale: Tensor | None,
    record: Tensor | None,
) -> Quantized:
    """quantize(y [M, F]) of x [M, F] or [M, 2F]"""
    x = rows_dense(x)
    gated = ACTIVATIONS[name].gated
    shape = (x.shape[0], x.shape[1] // 2 if gated else x.shape[1])
    made = fused_codes.target(shape, spec, scale, record, x.device)
    launch = _forward_launch(
        name,
        gated,
        shape,
        x.stride(0),
        x.dtype,
        (params.limit, params.alpha, params.offset),
        made.codes_t is not None,
        made.codes is None,
    )
    (y,) = run(launch, (x, *made))
    return fused_codes.finished(made, y, spec)


def backward(
    name: str,
    dy: Tensor,
    x: Tensor | None,
    params: ActivationParams | None,
    spec: QuantizeSpec,
    scale: Tensor | None,
    record: Tensor | None,
    dbias: torch.dtype | None,
) -> tuple[Quantized, Tensor | None]:
    """(quantize(dx [M, N]), its column sums [N]); "identity" has no x, its dx is dy."""
    dy = rows_dense(dy)
    x = None if x is None else rows_dense(x)
    gated = name != "identity" and ACTIVATIONS[name].gated
    shape = (dy.shape[0], dy.shape[1])
    made = fused_codes.target((shape[0], 2 * shape[1] if gated else shape[1]), spec, scale, record, dy.device)
    launch = _backward_launch(
        name,
        gated,
        shape,
        (dy.stride(0), 0 if x is None else x.stride(0)),
        dy.dtype if x is None else x.dtype,
        _NO_CONSTANTS if params is None else (params.limit, params.alpha, params.offset),
        made.codes_t is not None,
        made.codes is None,
        dbias is not None,
    )
    dx, partials = run(launch, (dy, x, *made))
    sums = None
    if dbias is not None:
        sums = run(_sum_launch(partials.shape, dbias), (partials,))[0]
    return fused_codes.finished(made, dx, spec), sums


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    columnwise: bool,
    returns_output: bool,
) -> Launch:
    from ....common.kernels import activation_cast  # it imports triton

    return activation_cast.forward(
        name, gated, shape, x_stride, DTYPE_NAMES[dtype], constants, columnwise, returns_output
    )


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    columnwise: bool,
    returns_output: bool,
    sums_columns: bool,
) -> Launch:
    from ....common.kernels import activation_cast  # it imports triton

    return activation_cast.backward(
        name, gated, shape, strides, DTYPE_NAMES[dtype], constants, columnwise, returns_output, sums_columns
    )


@functools.lru_cache(maxsize=1024)
def _sum_launch(partials: torch.Size, dtype: torch.dtype) -> Launch:
    from ....common.kernels import activation_cast  # it imports triton

    return activation_cast.sum_columns((partials[0], partials[1]), DTYPE_NAMES[dtype])

"""codes [M, F] of f(x), codes [M, N] of dx or of dy itself, their transposes and column sums: one kernel on a GPU.

One scale a tensor goes to `activation_cast`, one a block to `block_fused`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....common.formats import Element
from .. import fused_codes, launching
from ..column_sums import sum_partials
from ..launching import DTYPE_NAMES, rows_dense, run
from ..quantize import Cast, Quantized, QuantizeSpec
from .request import ACTIVATIONS, ActivationParams

if TYPE_CHECKING:
    from ....common.kernels.launch import Launch

_LIMIT = 1 << 24  # offsets inside a tile of 128 rows are 32-bit integers
_HALVES = 256  # two halves of whole blocks
_NO_CONSTANTS = (0.0, 0.0, 0.0)


def fuses(x: Tensor, halves: bool, cast: Cast) -> bool:
    """Can the result, [M, F] of x [M, 2F] if it halves the columns, be quantized where it is made?"""
    if x.dim() != 2 or max(x.shape[1], x.stride(0)) >= _LIMIT:
        return False
    shape = (x.shape[0], x.shape[1] // 2 if halves else x.shape[1])
    return fused_codes.fuses(shape, x.dtype, x.device, cast)


def gradient_fuses(spec: QuantizeSpec, sums_columns: bool) -> bool:
    """Is dx quantized faster where it is made than after it? Not in blocks of rows alone beside its column sums.

    H200, 8192 x 14336 bfloat16, SwiGLU and GELU, both directions: 0.507 and 0.298 ms (0.548 and 0.304 in two steps),
    with sums 0.679 and 0.373 (0.677 and 0.380, but dx is stored then); rows alone 0.285 and 0.219 (0.444 and 0.254),
    with sums 0.772 and 0.434 (0.573 and 0.328).
    """
    return not (sums_columns and fused_codes.in_row_blocks(spec))


def fuses_backward(name: str, x: Tensor, cast: Cast, sums_columns: bool) -> bool:
    """Is dx, shaped as x, quantized where it is made? The blocks of a gate's gradient must end where the other half's
    begin."""
    if ACTIVATIONS[name].gated and fused_codes.in_blocks(cast.spec) and x.shape[-1] % _HALVES:
        return False
    return gradient_fuses(cast.spec, sums_columns) and fuses(x, False, cast)


def forward(name: str, x: Tensor, params: ActivationParams, cast: Cast) -> Quantized:
    """quantize(y [M, F]) of x [M, F] or [M, 2F]"""
    x, spec = rows_dense(x), cast.spec
    gated = ACTIVATIONS[name].gated
    shape = (x.shape[0], x.shape[1] // 2 if gated else x.shape[1])
    if fused_codes.in_blocks(spec):
        constants = (params.limit, params.alpha, params.offset)
        launch = _forward_blocks_launch(
            name, gated, shape, x.stride(0), x.dtype, constants, spec, x.device.index
        )
        return Quantized(*run(launch, (x,)))
    scale, amax = fused_codes.given(cast, x.device)
    launch = _forward_launch(
        name,
        gated,
        shape,
        x.stride(0),
        x.dtype,
        (params.limit, params.alpha, params.offset),
        *_codes_of(spec, scale),
    )
    return fused_codes.finished(run(launch, (x, scale, amax)), scale, amax, spec)


def backward(
    name: str,
    dy: Tensor,
    x: Tensor | None,
    params: ActivationParams | None,
    cast: Cast,
    dbias: torch.dtype | None,
) -> tuple[Quantized, Tensor | None]:
    """(quantize(dx [M, N]), its column sums [N]); "identity" has no x, its dx is dy."""
    dy, spec = rows_dense(dy), cast.spec
    x = None if x is None else rows_dense(x)
    gated = name != "identity" and ACTIVATIONS[name].gated
    shape = (dy.shape[0], dy.shape[1])
    strides = (dy.stride(0), 0 if x is None else x.stride(0))
    dtype = dy.dtype if x is None else x.dtype
    constants = _NO_CONSTANTS if params is None else (params.limit, params.alpha, params.offset)
    if fused_codes.in_blocks(spec):
        bytes_read = dy.itemsize + (0 if x is None else (2 if gated else 1) * x.itemsize)
        launch = _backward_blocks_launch(
            name,
            gated,
            shape,
            strides,
            dtype,
            constants,
            bytes_read,
            spec,
            dbias is not None,
            dy.device.index,
        )
        *codes, partials = run(launch, (dy, x))
        return Quantized(*codes), None if dbias is None else sum_partials(partials, dbias)
    scale, amax = fused_codes.given(cast, dy.device)
    launch = _backward_launch(
        name,
        gated,
        shape,
        strides,
        dtype,
        constants,
        *_codes_of(spec, scale),
        dbias is not None,
    )
    *made, partials = run(launch, (dy, x, scale, amax))
    sums = None if dbias is None else sum_partials(partials, dbias)
    return fused_codes.finished(made, scale, amax, spec), sums


def _codes_of(spec: QuantizeSpec, scale: Tensor | None) -> tuple[Element | None, bool]:
    """(their element, are they transposed too): without a scale, the kernel makes none."""
    return (None, False) if scale is None else (spec.element, spec.columnwise)


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    element: Element | None,
    columnwise: bool,
) -> Launch:
    from ....common.kernels import activation_cast  # it imports triton

    return activation_cast.forward(
        name, gated, shape, x_stride, DTYPE_NAMES[dtype], constants, element, columnwise
    )


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    element: Element | None,
    columnwise: bool,
    sums_columns: bool,
) -> Launch:
    from ....common.kernels import activation_cast  # it imports triton

    return activation_cast.backward(
        name, gated, shape, strides, DTYPE_NAMES[dtype], constants, element, columnwise, sums_columns
    )


@functools.lru_cache(maxsize=1024)
def _forward_blocks_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    x_stride: int,
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    spec: QuantizeSpec,
    device: int,
) -> Launch:
    from ....common.kernels import block_fused  # it imports triton

    machine = block_fused.Machine(*launching.processors(device), (2 if gated else 1) * dtype.itemsize)
    blocks = fused_codes.blocks(spec, dtype)
    return block_fused.forward(name, gated, shape, x_stride, constants, blocks, machine)


@functools.lru_cache(maxsize=1024)
def _backward_blocks_launch(
    name: str,
    gated: bool,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    constants: tuple[float, float, float],
    bytes_read: int,
    spec: QuantizeSpec,
    sums_columns: bool,
    device: int,
) -> Launch:
    from ....common.kernels import block_fused  # it imports triton

    machine = block_fused.Machine(*launching.processors(device), bytes_read)
    blocks = fused_codes.blocks(spec, dtype)
    return block_fused.backward(name, gated, shape, strides, constants, blocks, sums_columns, machine)

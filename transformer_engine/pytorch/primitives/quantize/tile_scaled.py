"""Formats of one level whose tiles know nothing of the rest of the matrix: encode one direction, and both follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ..operand import Operand
from . import tiles
from .float8 import widen
from .format_row import FormatRow, Given, Plan, PlannedCall
from .spec import Quantized, QuantizeSpec, Request
from .triton_tiles import LaunchOf, tiled_call


def tile_scaled(
    form: TensorFormat,
    encode: Callable[[Tensor, QuantizeSpec], tuple[Tensor, Tensor]],
    *,
    decoded: Callable[[Tensor], Tensor] | None = None,
    launch: LaunchOf | None = None,
    empty_scale: Callable[[Tensor, int, int], Tensor] | None = None,
) -> FormatRow:
    """The row of such a format.

    encode     (x [R, K], spec) -> (codes [R, K], scales [ceil(R/r), ceil(K/c)]), one a tile of spec.tile
    decoded    scales as float32, where they are not
    launch     (spec, shape, dtype, device) -> the kernel call that makes what spec asks for; None: there is none
    """

    def quantize(x: Tensor, spec: QuantizeSpec, given: Given) -> Quantized:
        return _both(x, spec, encode)

    def dequantize(operand: Operand, scale: Tensor) -> Tensor:
        assert form.block is not None
        values = tiles.cut(widen(operand.codes), form.block)
        values = values * tiles.spread(scale if decoded is None else decoded(scale))
        return tiles.join(values.to(operand.dtype), (operand.rows, operand.depth))

    plan = None if launch is None else _plan(launch)
    return FormatRow(form, quantize, dequantize, plan=plan, empty_scale=empty_scale)


def _plan(launch: LaunchOf) -> Plan:
    def plan(request: Request) -> PlannedCall:
        tiled = tiled_call(launch, request)
        return lambda x, multiplier, amax, amax_t, record, random=None: tiled(x)

    return plan


def _both(
    x: Tensor, spec: QuantizeSpec, encode: Callable[[Tensor, QuantizeSpec], tuple[Tensor, Tensor]]
) -> Quantized:
    codes = scale = codes_t = scale_t = None
    if spec.rowwise or spec.transposes:
        codes, scale = encode(x, spec)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t = transposed(codes), transposed(scale)
        else:
            codes_t, scale_t = encode(transposed(x), spec)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=scale_a_row(scale, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=scale_a_row(scale_t, spec, x.shape[1]),
    )


def transposed(matrix: Tensor) -> Tensor:
    """[R, K] -> [K, R], row after row."""
    # Not contiguous(): it would keep [K, 1] with strides (1, K), which cannot be viewed as another dtype.
    return matrix.t().clone(memory_format=torch.contiguous_format)


def scale_a_row(scale: Tensor | None, spec: QuantizeSpec, rows: int) -> Tensor | None:
    """A 2-D variant of a format whose scales belong to rows repeats a tile's scale on its rows."""
    if scale is None or not spec.two_dimensional or spec.tile is None:
        return scale
    return tiles.repeat_rows(scale, spec.tile[0], rows)

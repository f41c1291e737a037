"""Formats with one scale level, whose tiles are independent: `encode` for one direction defines both directions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ....common.kernels.launch import Launch
from ....common.kernels.program import Program, step
from ...runtime.launching import Performed
from ..operand import Operand
from . import tiles
from .encodings import transposed, widen
from .format_row import FormatRow, PlannedCall, QuantizeInputs
from .spec import Quantized, QuantizeRequest, QuantizeSpec

LaunchOf = Callable[[QuantizeSpec, "tuple[int, int]", torch.dtype, torch.device], Launch]


def tile_scaled(
    form: TensorFormat,
    encode: Callable[[Tensor, QuantizeSpec], tuple[Tensor, Tensor]],
    *,
    decoded: Callable[[Tensor], Tensor] | None = None,
    launch: LaunchOf | None = None,
    empty_scale: Callable[[Tensor, int, int], Tensor] | None = None,
    matrices: Callable[[QuantizeSpec, tuple[int, int], int], Launch] | None = None,
) -> FormatRow:
    """Return the row for a format with one scale level.

    Args:
        form: The format.
        encode: `encode(x [R, K], spec)` returns (codes [R, K], scales [ceil(R/r), ceil(K/c)]), with
            one scale per spec.tile.
        decoded: Converts the scales to float32; None: they are float32.
        launch: `launch(spec, shape, dtype, device)` returns the launch that writes the directions
            of spec; None: there is no kernel.
        empty_scale: `empty_scale(x, rows, depth)` returns uninitialized scales; None: row-major.
        matrices: See `FormatRow`.
    """

    def quantize(x: Tensor, spec: QuantizeSpec, inputs: QuantizeInputs) -> Quantized:
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

    def dequantize(operand: Operand, scale: Tensor) -> Tensor:
        assert form.block is not None
        values = tiles.cut(widen(operand.codes), form.block)
        values = values * tiles.spread(scale if decoded is None else decoded(scale))
        return tiles.join(values.to(operand.dtype), (operand.rows, operand.depth))

    def plan(request: QuantizeRequest) -> PlannedCall:
        assert launch is not None
        first = launch(request.spec, request.shape, request.dtype, request.device)
        only = step(first, ("x",), ("codes", "scale", "codes_t", "scale_t")[: len(first.outputs)])
        performed = Performed(Program(("x",), (only,), only.outputs), request.device)
        return lambda x, inputs: Quantized(*performed(x if x.is_contiguous() else x.contiguous()))

    planned = None if launch is None else plan
    return FormatRow(
        form, quantize, dequantize, plan=planned, empty_scale=empty_scale, matrices=matrices
    )


def scale_a_row(scale: Tensor | None, spec: QuantizeSpec, rows: int) -> Tensor | None:
    """Repeat the scale of each square tile for its rows, in the 2-D variant of a format with scales per row."""
    if scale is None or not spec.two_dimensional or spec.tile is None:
        return scale
    return tiles.repeat_rows(scale, spec.tile[0], rows)

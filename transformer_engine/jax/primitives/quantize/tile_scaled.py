"""Formats of one level whose tiles know nothing of the rest of the matrix: encode one direction, and both follow."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ....common.formats import TensorFormat
from ..operand import Operand
from . import tiles
from .format_row import FormatRow
from .spec import Given, Quantized, QuantizeSpec
from .triton_tiles import plan

Encode = Callable[[Array, QuantizeSpec], tuple[Array, Array]]


def tile_scaled(form: TensorFormat, encode: Encode, apply: Callable[[Array, Array], Array]) -> FormatRow:
    """The row of such a format.

    encode   (x [R, K], spec) -> (codes [R, K], scales [ceil(R/r), ceil(K/c)]), one a tile of spec.tile
    apply    (float32 tiles, scales that spread over them) -> their product
    """

    def quantize(x: Array, spec: QuantizeSpec, given: Given) -> Quantized:
        return _both(x, spec, encode)

    def dequantize(operand: Operand, scale: Array) -> Array:
        assert form.block is not None
        values = tiles.cut(operand.codes.astype(jnp.float32), form.block)
        return tiles.join(apply(values, tiles.spread(scale)), (operand.rows, operand.depth))

    return FormatRow(form, quantize, dequantize, plan=plan)


def _both(x: Array, spec: QuantizeSpec, encode: Encode) -> Quantized:
    codes = scale = codes_t = scale_t = None
    if spec.rowwise or spec.transposes:
        codes, scale = encode(x, spec)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t = codes.T, scale.T
        else:
            codes_t, scale_t = encode(x.T, spec)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=scale_a_row(scale, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=scale_a_row(scale_t, spec, x.shape[1]),
    )


def scale_a_row(scale: Array | None, spec: QuantizeSpec, rows: int) -> Array | None:
    """A 2-D variant of a format whose scales belong to rows repeats a tile's scale on its rows."""
    if scale is None or not spec.two_dimensional or spec.tile is None:
        return scale
    return tiles.repeat_rows(scale, spec.tile[0], rows)

"""Formats of one level whose tiles know nothing of the rest of the matrix: encode one direction, and both follow."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ....common.formats import TensorFormat
from ..operand import Operand, matrix_shape, turned
from . import tiles
from .format_row import FormatRow
from .spec import Given, Quantized, QuantizeSpec
from .triton_tiles import plan

Encode = Callable[[Array, QuantizeSpec, int], tuple[Array, Array]]


def tile_scaled(form: TensorFormat, encode: Encode, apply: Callable[[Array, Array], Array]) -> FormatRow:
    """The row of such a format.

    encode   (x [*R, *K], spec, where K begins) -> (codes [*R, *K], scales [.., ceil(R/r), .., ceil(K/c)]), one a tile
             of spec.tile
    apply    (float32 tiles, scales that spread over them) -> their product
    """

    def quantize(x: Array, spec: QuantizeSpec, given: Given, axis: int) -> Quantized:
        return _both(x, spec, encode, axis)

    def dequantize(operand: Operand, scale: Array) -> Array:
        assert form.block is not None
        axis = operand.axis
        values = tiles.cut(operand.codes.astype(jnp.float32), form.block, axis)
        return tiles.join(apply(values, tiles.spread(scale, axis)), operand.codes.shape, axis)

    return FormatRow(form, quantize, dequantize, plan=plan)


def _both(x: Array, spec: QuantizeSpec, encode: Encode, axis: int) -> Quantized:
    codes = scale = codes_t = scale_t = None
    if spec.rowwise or spec.transposes:
        codes, scale = encode(x, spec, axis)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t = turned(codes, axis), turned(scale, axis)
        else:
            codes_t, scale_t = encode(turned(x, axis), spec, x.ndim - axis)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=matrix_of_scales(scale, spec, x.shape, axis) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=matrix_of_scales(scale_t, spec, turned_shape(x.shape, axis), x.ndim - axis),
    )


def turned_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of turned(x, axis)."""
    return (*shape[axis:], *shape[:axis])


def matrix_of_scales(
    scale: Array | None, spec: QuantizeSpec, shape: tuple[int, ...], axis: int
) -> Array | None:
    """The scales of an array [*R, *K] of that shape as a matrix, as `Operand` has them.

    A 2-D variant of a format whose scales belong to rows repeats a tile's scale on its rows.
    """
    if scale is None:
        return None
    if spec.two_dimensional and spec.tile is not None:
        scale = tiles.repeat_rows(scale, spec.tile[0], shape[axis - 1], axis)
    return scale.reshape(matrix_shape(scale.shape, axis))

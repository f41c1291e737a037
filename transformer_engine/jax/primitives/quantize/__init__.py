"""codes, scale = quantize(x [M, K], spec); values = dequantize(operand)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax.numpy as jnp
from jax import Array

from ....common.checks import described
from ....common.dispatch import Table
from ..operand import Operand, matrix_shape
from ..platforms import compute
from . import reference, tiles, triton
from .elements import (
    absolute_maximum,
    cast,
    nonzero_multiplier,
    pack_e2m1,
    scale_from_amax,
    unpack_e2m1,
)
from .formats import FORMATS
from .hadamard import hadamard_transform, inverse_transform
from .spec import OutputCast, Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec, jax_dtype

__all__ = [
    "FORMATS",
    "TABLE",
    "OutputCast",
    "QuantizeRequest",
    "QuantizeSpec",
    "Quantized",
    "absolute_maximum",
    "cast",
    "decoded",
    "dequantize",
    "hadamard_transform",
    "inverse_transform",
    "jax_dtype",
    "nonzero_multiplier",
    "pack_e2m1",
    "quantize",
    "scale_from_amax",
    "unpack_e2m1",
]

TABLE: Table[QuantizeRequest] = Table("jax_quantize", (triton.BACKEND, reference.BACKEND))
_VALUES = (jnp.float32, jnp.bfloat16, jnp.float16)


def quantize(
    x: Array,
    spec: QuantizeSpec,
    *,
    multiplier: Array | None = None,
    amax: Array | None = None,
    amax_t: Array | None = None,
    random: tuple[Array, Array | None] | None = None,
    axis: int | None = None,
    mesh_axes: tuple[str, ...] = (),
) -> Quantized:
    """Quantize x [*M, *K] in the directions that spec requests.

    Args:
        x: Values, float32, bfloat16 or float16.
        spec: Format, options and directions.
        multiplier: FLOAT8: multiplier that replaces the one derived from the absolute maximum (delayed scaling); 0 is
            read as 1.
        amax: FLOAT8, NVFP4: absolute maximum in place of the measured one; NVFP4 also accepts one per row tile of a
            matrix, [tiles, 1], or one per tile along K, [1, tiles].
        amax_t: NVFP4: the same for the columnwise direction.
        random: NVFP4, stochastic: uniform float32 in [0, 1) with the rowwise and the columnwise codes' shapes, or
            matrices [M, K] and [K, M]. If two_dimensional, only the first is read: the columnwise codes are its
            transpose.
        axis: Where K begins; None for a matrix. Codes keep the axes of x, [*M, *K] and [*K, *M], so that any axis may
            be sharded.
        mesh_axes: FLOAT8, NVFP4: manual mesh axes over which the matrix is sharded; x is one shard. Measured maxima
            cover all shards. A block must not cross shards.

    Returns:
        Codes and scales.

    Raises:
        ValueError: axis leaves no rows or no columns, the format does not support the shape, or an input is missing or
            not used by the format.
        TypeError: x has another dtype.
    """
    if axis is None and x.ndim != 2:
        raise ValueError(
            f"x has shape {x.shape}; quantize takes a matrix [M, K], reshape it or say by axis where its columns begin"
        )
    axis = 1 if axis is None else axis
    if not 0 < axis < x.ndim:
        raise ValueError(
            f"axis={axis} leaves no rows or no columns of x {x.shape}; give one from 1 to {x.ndim - 1}"
        )
    shape = matrix_shape(x.shape, axis)
    _check(x, axis, spec, multiplier, random)
    if spec.stochastic and random is not None:
        turned_shape = (*x.shape[axis:], *x.shape[:axis])
        random = (
            random[0].reshape(x.shape),
            None if random[1] is None else random[1].reshape(turned_shape),
        )
    per_tile = any(maximum is not None and maximum.ndim == 2 for maximum in (amax, amax_t))
    return compute(
        TABLE,
        lambda platform: QuantizeRequest(
            spec, shape, x.dtype, platform, multiplier is not None, axis, per_tile
        ),
        x,
        QuantizeInputs(multiplier, amax, amax_t, random, mesh_axes),
    )


def dequantize(operand: Operand) -> Array:
    """Compute values [*rows, *K] = codes * scale in float32, rounded once to operand.dtype."""
    form = operand.format
    if form is None:
        return operand.codes.astype(operand.dtype)
    if operand.scale is None:
        raise ValueError(
            f"an operand of format {form.name} needs its scale, which is None; pass the one that `quantize` returned"
        )
    return decoded(operand).astype(operand.dtype)


def decoded(operand: Operand) -> Array:
    """Decode an operand that has scales to float32 values [*rows, *K]."""
    form, codes, scale = operand.format, operand.codes, operand.scale
    assert form is not None and scale is not None
    if form.block is not None:
        shape, axis = tiles.split_axes(codes.shape, operand.axis, form.block)
        scale = scale.reshape(tiles.counts(shape, axis, form.block))
        operand = replace(operand, codes=codes.reshape(shape), axis=axis)
    return FORMATS[form.name].dequantize(operand, scale).reshape(codes.shape)


def _check(
    x: Array,
    axis: int,
    spec: QuantizeSpec,
    multiplier: Array | None,
    random: tuple[Array, Array | None] | None,
) -> None:
    """Raise TypeError or ValueError for inputs that do not fit the spec or the matrix."""
    if x.dtype not in _VALUES:
        raise TypeError(
            f"x is {described(x)}; quantize takes float32, bfloat16 and float16, cast it"
        )
    if multiplier is not None and spec.format.block is not None:
        raise ValueError(
            f"a multiplier was given for format {spec.format.name}, which has one per block; give none, or use FLOAT8"
        )
    rows, depth = matrix_shape(x.shape, axis)
    if (check := FORMATS[spec.format.name].check_shape) is not None:
        check(rows, depth, spec)
    if spec.stochastic:
        sides = (x.shape[:axis], x.shape[axis:])
        if random is None:
            raise ValueError(
                "stochastic rounding needs random=(uniform [M, K], uniform [K, M]), float32 in [0, 1); it is None"
            )
        expected = (
            (sides, spec.rowwise or spec.transposes),
            (sides[::-1], spec.columnwise and not spec.transposes),
        )
        for index, (numbers, ((rows, columns), read)) in enumerate(
            zip(random, expected, strict=True)
        ):
            numbers_shape = None if numbers is None else numbers.shape
            if read and numbers_shape not in (
                (*rows, *columns),
                matrix := (prod(rows), prod(columns)),
            ):
                shape = None if numbers_shape is None else list(numbers_shape)
                raise ValueError(
                    f"random[{index}] is {shape}; draw one number an element, {list(matrix)}"
                )

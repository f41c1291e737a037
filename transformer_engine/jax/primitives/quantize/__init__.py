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
from .casting import Cast
from .float8 import absolute_maximum, cast, given_multiplier, scale_from_amax
from .formats import FORMATS
from .hadamard import hadamard_transform, inverse_transform
from .spec import Given, Quantized, QuantizeSpec, Request, jax_dtype

__all__ = [
    "FORMATS",
    "TABLE",
    "Cast",
    "QuantizeSpec",
    "Quantized",
    "Request",
    "absolute_maximum",
    "cast",
    "decoded",
    "dequantize",
    "given_multiplier",
    "hadamard_transform",
    "inverse_transform",
    "jax_dtype",
    "quantize",
    "scale_from_amax",
]

TABLE: Table[Request] = Table("jax_quantize", (triton.BACKEND, reference.BACKEND))
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
    over: tuple[str, ...] = (),
) -> Quantized:
    """x [*M, *K] -> codes and scales of the directions that spec asks for.

    multiplier  FLOAT8: multiply by this instead of one made from the absolute maximum (delayed scaling); 0 is read as 1
    amax      FLOAT8, NVFP4: the absolute maximum to use
    amax_t    NVFP4: the same for the columnwise direction
    random    NVFP4, stochastic: uniform float32 in [0, 1), shaped as the rowwise codes and as the columnwise, or as
              matrices [M, K] and [K, M] (two_dimensional: the first alone, the columnwise codes being its transpose)
    axis      where K begins; None: x is a matrix. Codes keep x's axes, [*M, *K] and [*K, *M], so that devices may hold
              parts of any of them
    over      FLOAT8, NVFP4: mesh axes, manual here, along which devices hold parts of the matrix that x is one of: the
              maxima that are measured are those of all parts. A block lies in one part
    """
    axis = _columns_of(x, axis)
    shape = matrix_shape(x.shape, axis)
    _check(x, axis, spec, multiplier, random)
    if spec.stochastic and random is not None:
        turned_shape = (*x.shape[axis:], *x.shape[:axis])
        random = random[0].reshape(x.shape), None if random[1] is None else random[1].reshape(turned_shape)
    return compute(
        TABLE, lambda platform: Request(spec, shape, x.dtype, platform, multiplier is not None, axis), x,
        Given(multiplier, amax, amax_t, random, over),
    )  # fmt: skip


def dequantize(operand: Operand) -> Array:
    """values [*rows, *K] = codes * scale, in float32 with one final rounding to operand.dtype."""
    form = operand.format
    if form is None:
        return operand.codes.astype(operand.dtype)
    if operand.scale is None:
        raise ValueError(
            f"an operand of format {form.name} needs its scale, which is None; pass the one that `quantize` returned"
        )
    return decoded(operand).astype(operand.dtype)


def decoded(operand: Operand) -> Array:
    """values [*rows, *K] in float32 of an operand that has scales."""
    form, codes, scale = operand.format, operand.codes, operand.scale
    assert form is not None and scale is not None
    if form.block is not None:
        shape, axis = tiles.cut_apart(codes.shape, operand.axis, form.block)
        scale = scale.reshape(tiles.counts(shape, axis, form.block))
        operand = replace(operand, codes=codes.reshape(shape), axis=axis)
    return FORMATS[form.name].dequantize(operand, scale).reshape(codes.shape)


def _columns_of(x: Array, axis: int | None) -> int:
    """Where the columns of x begin; ValueError where there are none, or no rows."""
    if axis is None and x.ndim != 2:
        raise ValueError(
            f"x has shape {x.shape}; quantize takes a matrix [M, K], reshape it or say by axis where its columns begin"
        )
    axis = 1 if axis is None else axis
    if not 0 < axis < x.ndim:
        raise ValueError(
            f"axis={axis} leaves no rows or no columns of x {x.shape}; give one from 1 to {x.ndim - 1}"
        )
    return axis


def _check(
    x: Array,
    axis: int,
    spec: QuantizeSpec,
    multiplier: Array | None,
    random: tuple[Array, Array | None] | None,
) -> None:
    if x.dtype not in _VALUES:
        raise TypeError(f"x is {described(x)}; quantize takes float32, bfloat16 and float16, cast it")
    if multiplier is not None and spec.format.block is not None:
        raise ValueError(
            f"a multiplier was given for format {spec.format.name}, which makes one a block; give none, or use FLOAT8"
        )
    rows, depth = matrix_shape(x.shape, axis)
    FORMATS[spec.format.name].check(rows, depth, spec)
    if spec.stochastic:
        _check_random((x.shape[:axis], x.shape[axis:]), spec, random)


def _check_random(
    sides: tuple[tuple[int, ...], tuple[int, ...]],
    spec: QuantizeSpec,
    random: tuple[Array, Array | None] | None,
) -> None:
    if random is None:
        raise ValueError(
            "stochastic rounding needs random=(uniform [M, K], uniform [K, M]), float32 in [0, 1); it is None"
        )
    wanted = (sides, spec.rowwise or spec.transposes), (sides[::-1], spec.columnwise and not spec.transposes)
    for place, (numbers, ((rows, columns), read)) in enumerate(zip(random, wanted, strict=True)):
        found = None if numbers is None else numbers.shape
        if read and found not in ((*rows, *columns), matrix := (prod(rows), prod(columns))):
            shape = None if found is None else list(found)
            raise ValueError(f"random[{place}] is {shape}; draw one number an element, {list(matrix)}")

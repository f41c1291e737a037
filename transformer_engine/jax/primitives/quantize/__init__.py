"""codes, scale = quantize(x [M, K], spec); values = dequantize(operand)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.checks import described
from ....common.dispatch import Table
from ..operand import Operand, matrix_shape
from ..platforms import computed
from . import reference, triton
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
) -> Quantized:
    """x [*M, *K] -> codes and scales of the directions that spec asks for.

    multiplier  FLOAT8: multiply by this instead of one made from the absolute maximum (delayed scaling); 0 is read as 1
    amax      FLOAT8, NVFP4: the absolute maximum to use
    amax_t    NVFP4: the same for the columnwise direction
    random    NVFP4, stochastic: uniform float32 in [0, 1), shaped [M, K] for the rowwise codes and [K, M] for
              the columnwise (two_dimensional: the first alone, the columnwise codes being its transpose)
    axis      where K begins; None: x is a matrix. Codes keep x's axes, [*M, *K] and [*K, *M], so that devices may hold
              parts of any of them
    """
    axis = _columns_of(x, axis)
    shape = matrix_shape(x.shape, axis)
    _check(x, shape, spec, multiplier, random)
    return computed(
        TABLE, lambda platform: Request(spec, shape, x.dtype, platform, multiplier is not None, axis), x,
        Given(multiplier, amax, amax_t, random),
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
    blocks = operand if form.block is None else operand.matrix()
    values = FORMATS[form.name].dequantize(blocks, operand.scale).astype(operand.dtype)
    return values.reshape(operand.codes.shape)


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
    shape: tuple[int, int],
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
    rows, depth = shape
    FORMATS[spec.format.name].check(rows, depth, spec)
    if spec.stochastic:
        _check_random(rows, depth, spec, random)


def _check_random(
    rows: int, depth: int, spec: QuantizeSpec, random: tuple[Array, Array | None] | None
) -> None:
    if random is None:
        raise ValueError(
            "stochastic rounding needs random=(uniform [M, K], uniform [K, M]), float32 in [0, 1); it is None"
        )
    along_rows, along_columns = random
    if (spec.rowwise or spec.transposes) and along_rows.shape != (rows, depth):
        raise ValueError(
            f"random[0] is {list(along_rows.shape)}; draw one number an element, {[rows, depth]}"
        )
    if spec.columnwise and not spec.transposes:
        found = None if along_columns is None else list(along_columns.shape)
        if found != [depth, rows]:
            raise ValueError(f"random[1] is {found}; draw one number an element, {[depth, rows]}")

"""Operand: a matrix [rows, K] as a product reads it, quantized or not, whose rows and K may be several axes each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from ...common.formats import TensorFormat


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "amax"],
    meta_fields=["format", "dtype", "axis", "hadamard"],
)
@dataclass(frozen=True)
class Operand:
    """codes [*rows, *K]; the contracted axes K come last.

    Axes stay apart as they were given, since devices may hold parts of any of them; scales are those of the matrix.

    codes   in a float8 dtype or float4_e2m1fn, or high precision when format is None
    scale   what a code is multiplied by: float32 [1], [rows, ceil(K/128)] or [ceil(rows/128), ceil(K/128)];
            MXFP8: float8_e8m0fnu [rows, ceil(K/32)]; NVFP4: float8_e4m3fn [rows, ceil(K/16)]
    amax    NVFP4 only: float32 [1], the absolute maximum from which the second-level scale follows, or [rows] where the
            format has one scale per row
    dtype   the nominal high-precision dtype of the values
    axis    where the contracted axes begin
    hadamard  whether the values were Hadamard transformed along the contracted axes; a product of two transformed
              operands equals the product of the original values
    """

    codes: Array
    scale: Array | None = None
    amax: Array | None = None
    format: TensorFormat | None = None
    dtype: jnp.dtype = jnp.dtype(jnp.float32)  # noqa: RUF009 (a dtype is immutable)
    axis: int = 1
    hadamard: bool = False

    @property
    def rows(self) -> int:
        return matrix_shape(self.codes.shape, self.axis)[0]

    @property
    def depth(self) -> int:
        """K, the number of contracted elements."""
        return matrix_shape(self.codes.shape, self.axis)[1]

    def matrix(self) -> Operand:
        """The same with one axis of rows and one contracted."""
        return replace(self, codes=self.codes.reshape(self.rows, self.depth), axis=1)


def plain(values: Array, axis: int = 1) -> Operand:
    """High-precision values [*rows, *K] as an operand, whose contracted axes begin at axis."""
    return Operand(values, dtype=values.dtype, axis=axis)


def matrix_shape(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """(rows, columns) of [*rows, *columns], whose columns begin at axis."""
    return prod(shape[:axis]), prod(shape[axis:])


def turned(x: Array, axis: int) -> Array:
    """x [*rows, *columns], whose columns begin at axis, as [*columns, *rows]."""
    return x.transpose(*range(axis, x.ndim), *range(axis))


Axes = Sequence[int]


def contraction(a: Operand, b: Operand) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """lax.dot_general's dimension numbers of a [*M, *K] and b [*N, *K]."""
    last = tuple(range(a.axis, a.codes.ndim)), tuple(range(b.axis, b.codes.ndim))
    return last, ((), ())

"""Operand: a matrix [rows, K] of a product, quantized or not, whose rows and K may be several axes each."""

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
    """A matrix [*rows, *K] with the contracted axes K last.

    Axes are not merged, since any of them may be sharded; scales have the matrix layout.

    Attributes:
        codes: Codes in a float8 dtype or float4_e2m1fn; values if format is None.
        scale: Factors of the codes: float32 [1], [rows, ceil(K/128)] or [ceil(rows/128), ceil(K/128)]; MXFP8:
            float8_e8m0fnu [rows, ceil(K/32)]; NVFP4: float8_e4m3fn [rows, ceil(K/16)].
        amax: NVFP4 only: the absolute maximum that determines the second-level scale, float32 [1], or [rows] if the
            format has one scale per row.
        format: Code format, None for values.
        dtype: Nominal high-precision dtype of the values.
        axis: Where the contracted axes begin.
        hadamard: Whether the values are Hadamard transformed along the contracted axes. A product from two transformed
            operands equals the product from the original values.
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
        """Number of rows."""
        return matrix_shape(self.codes.shape, self.axis)[0]

    @property
    def depth(self) -> int:
        """Number of contracted elements K."""
        return matrix_shape(self.codes.shape, self.axis)[1]

    def matrix(self) -> Operand:
        """Merge the operand's axes into one row axis and one contracted axis."""
        return replace(self, codes=self.codes.reshape(self.rows, self.depth), axis=1)


def plain(values: Array, axis: int = 1) -> Operand:
    """Wrap values [*rows, *K] as an operand whose contracted axes begin at axis."""
    return Operand(values, dtype=values.dtype, axis=axis)


def matrix_shape(shape: Sequence[int], axis: int) -> tuple[int, int]:
    """Compute (rows, columns) for a shape [*rows, *columns] whose columns begin at axis."""
    return prod(shape[:axis]), prod(shape[axis:])


def turned(x: Array, axis: int) -> Array:
    """Transpose x [*rows, *columns], whose columns begin at axis, to [*columns, *rows]."""
    return x.transpose(*range(axis, x.ndim), *range(axis))


def contraction(
    a: Operand, b: Operand
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[()], tuple[()]]]:
    """Build `lax.dot_general` dimension numbers for a [*M, *K] and b [*N, *K]."""
    last = tuple(range(a.axis, a.codes.ndim)), tuple(range(b.axis, b.codes.ndim))
    return last, ((), ())

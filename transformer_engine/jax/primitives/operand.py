"""Operand: a matrix [rows, K] as a product reads it, quantized or not."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ...common.formats import TensorFormat


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "amax"],
    meta_fields=["format", "dtype"],
)
@dataclass(frozen=True)
class Operand:
    """codes [rows, K]; the contracted axis K comes last.

    codes   in a float8 dtype or float4_e2m1fn, or high precision when format is None
    scale   what a code is multiplied by: float32 [1], [rows, ceil(K/128)] or [ceil(rows/128), ceil(K/128)];
            MXFP8: float8_e8m0fnu [rows, ceil(K/32)]; NVFP4: float8_e4m3fn [rows, ceil(K/16)]
    amax    NVFP4 only: float32 [1], the tensor's absolute maximum, whence the second-level scale
    dtype   the nominal high-precision dtype of the values
    """

    codes: Array
    scale: Array | None = None
    amax: Array | None = None
    format: TensorFormat | None = None
    dtype: jnp.dtype = jnp.dtype(jnp.float32)  # noqa: RUF009 (a dtype is immutable)

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        """K, the number of contracted elements."""
        return self.codes.shape[1]


def plain(matrix: Array) -> Operand:
    """A high-precision matrix [rows, K] as an operand."""
    return Operand(matrix, dtype=matrix.dtype)

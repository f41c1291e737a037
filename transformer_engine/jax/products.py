"""The three products of a linear layer, and the operands that they take from quantized tensors.

x [M, K] (axes *batch, *contracted), kernel [K, N] (axes *contracted, *features), dy [M, N]:
    y  [M, N] = x.rows @ kernel.columns.T
    dx [M, K] = dy.rows @ kernel.rows.T
    dw [K, N] = x.columns @ dy.columns.T
"""

from __future__ import annotations

from math import prod
from typing import Any

from jax import Array

from ..common import env
from .primitives.gemm import gemm
from .primitives.operand import Operand, plain
from .quantize.quantizers import Quantizer
from .quantize.scaling_modes import TensorUsage
from .quantize.tensors import NoScaleTensor, ScaledTensor, ScaledTensor1x, positive_axis

Tensor = ScaledTensor | NoScaleTensor


def encode(quantizer: Quantizer | None, x: Array, flatten_axis: int) -> tuple[Tensor, Array | None]:
    """x in both directions as its quantizer makes them, and its absolute maximum; x itself without one."""
    if quantizer is None:
        return NoScaleTensor(x), None
    return quantizer.encode(x, flatten_axis=flatten_axis)


def row_operand(tensor: Tensor, flatten_axis: int) -> Operand:
    """The matrix [rows, columns], to be contracted over its columns."""
    if isinstance(tensor, NoScaleTensor):
        return plain(_matrix(tensor.data, flatten_axis))
    return tensor.get_tensor(TensorUsage.LHS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def column_operand(tensor: Tensor, flatten_axis: int) -> Operand:
    """The transposed matrix [columns, rows], to be contracted over the rows."""
    if isinstance(tensor, NoScaleTensor):
        return plain(_matrix(tensor.data, flatten_axis).T)
    if (
        isinstance(tensor, ScaledTensor1x)
        and not tensor.is_colwise
        and tensor.scaling_mode.is_tensor_scaling()
    ):
        # One scale a tensor: the codes of both directions are the same.
        rows = tensor.operand()
        return Operand(rows.codes.T, rows.scale, rows.amax, rows.format, rows.dtype)
    return tensor.get_tensor(TensorUsage.LHS_TRANS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def forward_product(x: Operand, kernel: Operand, dtype: Any) -> Array:
    """y [M, N] = x [M, K] @ kernel [N, K].T in dtype."""
    return gemm(x, kernel, dtype, exact=env.flag("NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION"))


def gradient_product(a: Operand, b: Operand, dtype: Any) -> Array:
    """A product of the backward pass: a [M, K] @ b [N, K].T in dtype, partial sums in float32."""
    return gemm(a, b, dtype)


def _matrix(x: Array, flatten_axis: int) -> Array:
    axis = positive_axis(flatten_axis, x.ndim)
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))

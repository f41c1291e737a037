"""The three products of a linear layer, and the operands that they take from quantized tensors.

x [M, K] (axes *batch, *contracted), kernel [K, N] (axes *contracted, *features), dy [M, N], all axes kept apart:
    y  [M, N] = x.rows @ kernel.columns.T
    dx [M, K] = dy.rows @ kernel.rows.T
    dw [K, N] = x.columns @ dy.columns.T
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import Array

from ..common import env
from .primitives.gemm import gemm
from .primitives.operand import Operand, plain, turned
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
    """[*rows, *columns], to be contracted over its columns."""
    if isinstance(tensor, NoScaleTensor):
        return plain(tensor.data, positive_axis(flatten_axis, tensor.ndim))
    if isinstance(tensor, ScaledTensor1x) and tensor.is_colwise:
        return plain(tensor.values(), positive_axis(flatten_axis, tensor.ndim))
    return tensor.get_tensor(TensorUsage.LHS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def column_operand(tensor: Tensor, flatten_axis: int) -> Operand:
    """[*columns, *rows], to be contracted over the rows."""
    if isinstance(tensor, NoScaleTensor):
        axis = positive_axis(flatten_axis, tensor.ndim)
        return plain(turned(tensor.data, axis), tensor.ndim - axis)
    if (
        isinstance(tensor, ScaledTensor1x)
        and not tensor.is_colwise
        and tensor.scaling_mode.is_tensor_scaling()
    ):
        # One scale a tensor: the codes of both directions are the same.
        rows = tensor.operand()
        return replace(rows, codes=turned(rows.codes, rows.axis), axis=rows.codes.ndim - rows.axis)
    if isinstance(tensor, ScaledTensor1x) and not tensor.is_colwise:
        # Block scales of the other direction do not factor out of this product: the values of the codes are multiplied.
        axis = positive_axis(flatten_axis, tensor.ndim)
        return plain(turned(tensor.values(), axis), tensor.ndim - axis)
    return tensor.get_tensor(TensorUsage.LHS_TRANS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def forward_product(x: Operand, kernel: Operand, dtype: Any) -> Array:
    """y [*M, *N] = x [*M, *K] @ kernel [*N, *K].T in dtype."""
    return gemm(x, kernel, dtype, exact=env.flag("NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION"))


def gradient_product(a: Operand, b: Operand, dtype: Any) -> Array:
    """A product of the backward pass: a [*M, *K] @ b [*N, *K].T in dtype, partial sums in float32."""
    return gemm(a, b, dtype)

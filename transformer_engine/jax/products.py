"""The three products of a linear layer, and the operands that they take from quantized tensors.

x [M, K] (axes *batch, *contracted), kernel [K, N] (axes *contracted, *features), dy [M, N], all axes kept apart:
    y  [M, N] = x.rows @ kernel.columns.T
    dx [M, K] = dy.rows @ kernel.rows.T
    dw [K, N] = x.columns @ dy.columns.T
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import Array, lax

from ..common import env
from .checks import is_symbolic
from .primitives.gemm import gemm
from .primitives.operand import Operand, plain, turned
from .quantize.quantizers import Quantizer
from .quantize.scaling_modes import QuantizeLayout, TensorUsage
from .quantize.tensors import NoScaleTensor, ScaledTensor, ScaledTensor1x, positive_axis

Tensor = ScaledTensor | NoScaleTensor


def encode(quantizer: Quantizer | None, x: Array, flatten_axis: int) -> tuple[Tensor, Array | None]:
    """x in both directions as its quantizer makes them, and its absolute maximum; x itself without one."""
    if quantizer is None:
        return NoScaleTensor(x), None
    return quantizer.encode(x, flatten_axis=flatten_axis)


# Gradients of at least this many elements are cast to rows alone; their codes are transposed once dx is computed, so
# that only one direction is allocated at a time. H200, 8192 tokens, delayed and current scaling: a gated MLP of
# 4096 x 14336 features needs 848 and 736 MiB of temporary memory instead of 1072 and 1040 and takes 6.71 and 7.22 ms
# instead of 6.66 and 7.10; a linear layer 176 MiB instead of 200, and 1.77 and 1.91 ms instead of 1.74 and 1.87 (H100).
LATE_ELEMENTS = 1 << 26


def gradient_quantizer(quantizer: Quantizer | None, gradient: Array) -> Quantizer | None:
    """Return the quantizer of an output gradient, for its rows alone if `gradient_products` makes the columns.

    The columns of a tensor with one scale are the transpose of its rows, bit for bit.
    """
    if quantizer is None or not quantizer.scaling_mode.is_tensor_scaling() or not _is_large(gradient):
        return quantizer
    both = quantizer.q_layout.has_rowwise and quantizer.q_layout.has_colwise
    return replace(quantizer, q_layout=QuantizeLayout.ROWWISE) if both else quantizer


def gradient_products(
    dy: Tensor, batch: int, kernel_rows: Operand, x_columns: Operand, dtypes: tuple[Any, Any]
) -> tuple[Array, Array]:
    """Compute dx and dw of a linear layer.

    Args:
        dy: Output gradient [*M, *N], encoded by its `gradient_quantizer`.
        batch: Number of axes of M.
        kernel_rows: Kernel, to be contracted over N.
        x_columns: Input of the layer, to be contracted over M.
        dtypes: Dtypes of dx and of dw.

    Returns:
        dx [*M, *K] and dw [*K, *N].
    """
    dx = gradient_product(row_operand(dy, batch), kernel_rows, dtypes[0])
    if (
        isinstance(dy, ScaledTensor1x)
        and not dy.is_colwise
        and dy.scaling_mode.is_tensor_scaling()
        and _is_large(dy.data)
    ):
        dy, dx = lax.optimization_barrier((dy, dx))
    return dx, gradient_product(x_columns, column_operand(dy, batch), dtypes[1])


def _is_large(gradient: Array) -> bool:
    return not is_symbolic(gradient.size) and gradient.size >= LATE_ELEMENTS


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

"""The three products in a linear layer, their operands from quantized tensors, and the bias.

x [M, K] (axes *batch, *contracted), kernel [K, N] (axes *contracted, *features), dy [M, N]; axes are not merged:

    y [M, N] = x.rows @ kernel.columns.T
    dx [M, K] = dy.rows @ kernel.rows.T
    dw [K, N] = x.columns @ dy.columns.T
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax import Array, lax

from ...common import env
from ..primitives.gemm import gemm
from ..primitives.operand import Operand, plain, turned
from ..quantize.quantizers import Quantizer, advanced_together, as_cotangent
from ..quantize.scaling_modes import QuantizeLayout, TensorUsage
from ..quantize.tensors import (
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    positive_axis,
)
from ..runtime.checks import is_symbolic
from ..runtime.undifferentiated import constant, undifferentiated

Tensor = ScaledTensor | NoScaleTensor


def encode(quantizer: Quantizer | None, x: Array, flatten_axis: int) -> tuple[Tensor, Array | None]:
    """Quantize x in the directions of its quantizer, if any; return the tensor and its absolute maximum."""
    if quantizer is None:
        return NoScaleTensor(x), None
    return quantizer.encode(x, flatten_axis=flatten_axis)


# Gradients with at least this many elements are cast to rows alone; their codes are transposed once dx is computed, so
# that only one direction is allocated at a time. H200, 8192 tokens, delayed and current scaling: a gated MLP with 4096
# x 14336 features needs 848 and 736 MiB temporary memory instead of 1072 and 1040 and takes 6.71 and 7.22 ms instead of
# 6.66 and 7.10; a linear layer 176 MiB instead of 200, and 1.77 and 1.91 ms instead of 1.74 and 1.87 (H100).
LATE_ELEMENTS = 1 << 26


def gradient_quantizer(
    quantizer: Quantizer | None, gradient: Array
) -> tuple[Quantizer | None, bool]:
    """Decide in which directions an output gradient is quantized.

    For a tensor with one scale, the columnwise codes are the transposed rowwise codes, bit for bit.

    Returns:
        The quantizer, for rows only if the columns are transposed late; and whether `gradient_products` transposes them
        after dx.
    """
    if quantizer is None or not quantizer.scaling_mode.is_tensor_scaling():
        return quantizer, False
    large = not is_symbolic(gradient.size) and gradient.size >= LATE_ELEMENTS
    if not large or not quantizer.q_layout.has_rowwise:
        return quantizer, False
    return replace(quantizer, q_layout=QuantizeLayout.ROWWISE), True


def gradient_products(
    dy: Tensor,
    transposes_late: bool,
    batch: int,
    kernel_rows: Operand,
    x_columns: Operand,
    dtypes: tuple[Any, Any],
) -> tuple[Array, Array]:
    """Compute dx and dw for a linear layer.

    Args:
        dy: Output gradient [*M, *N], encoded by its `gradient_quantizer`.
        transposes_late: Whether the codes of dy are transposed after dx is computed; see `gradient_quantizer`.
        batch: Number of axes of M.
        kernel_rows: Kernel, to be contracted over N.
        x_columns: Layer input, to be contracted over M.
        dtypes: dx and dw dtypes.

    Returns:
        dx [*M, *K] and dw [*K, *N].
    """
    dx = gemm(row_operand(dy, batch), kernel_rows, dtypes[0])
    if transposes_late:
        dy, dx = lax.optimization_barrier((dy, dx))
    return dx, gemm(x_columns, column_operand(dy, batch), dtypes[1])


def row_operand(tensor: Tensor, flatten_axis: int) -> Operand:
    """Operand [*rows, *columns] that is contracted over the columns."""
    if isinstance(tensor, NoScaleTensor):
        return plain(tensor.data, positive_axis(flatten_axis, tensor.ndim))
    if isinstance(tensor, ScaledTensor1x) and tensor.is_colwise:
        return plain(tensor.values(), positive_axis(flatten_axis, tensor.ndim))
    return tensor.get_tensor(TensorUsage.LHS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def column_operand(tensor: Tensor, flatten_axis: int) -> Operand:
    """Operand [*columns, *rows] that is contracted over the rows."""
    if isinstance(tensor, NoScaleTensor):
        axis = positive_axis(flatten_axis, tensor.ndim)
        return plain(turned(tensor.data, axis), tensor.ndim - axis)
    if (
        isinstance(tensor, ScaledTensor1x)
        and not tensor.is_colwise
        and tensor.scaling_mode.is_tensor_scaling()
    ):
        # With one scale per tensor, both directions have equal codes.
        rows = tensor.operand()
        return replace(rows, codes=turned(rows.codes, rows.axis), axis=rows.codes.ndim - rows.axis)
    if isinstance(tensor, ScaledTensor1x) and not tensor.is_colwise:
        # The other direction's block scales are not factors in this product: it multiplies the decoded values.
        axis = positive_axis(flatten_axis, tensor.ndim)
        return plain(turned(tensor.values(), axis), tensor.ndim - axis)
    return tensor.get_tensor(TensorUsage.LHS_TRANS).operand()  # pyright: ignore[reportAttributeAccessIssue]


def forward_product(x: Operand, kernel: Operand, dtype: Any) -> Array:
    """Compute y [*M, *N] = x [*M, *K] @ kernel [*N, *K].T in dtype."""
    return gemm(x, kernel, dtype, exact=env.flag("NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION"))


@jax.custom_vjp
def quantized_identity(x: Array, quantizer: Quantizer) -> Array:
    """Compute y = dequantize(quantize(x)); x receives the gradient of y, the quantizer its next state."""
    return _forward(x, quantizer)[0]


def _forward(x: Array, quantizer: Quantizer) -> tuple[Array, Any]:
    quantizer = constant(quantizer)
    tensor, amax = quantizer.encode(constant(x))
    (following,) = advanced_together((quantizer,), (amax,))
    operand = tensor.rowwise_tensor if isinstance(tensor, ScaledTensor2x) else tensor
    y = operand.values(x.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return undifferentiated(y, x), following


quantized_identity.defvjp(_forward, lambda following, dy: (dy, as_cotangent(following)))


def biased(y: Array, bias: Array | None) -> Array:
    """Compute y [*batch, *features] + bias [*features] in y's dtype; y without a bias.

    The axes are expanded explicitly: jax_numpy_rank_promotion may be "raise".
    """
    if bias is None:
        return y
    return y + lax.expand_dims(bias.astype(y.dtype), range(y.ndim - bias.ndim))

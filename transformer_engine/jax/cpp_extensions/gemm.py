"""Products of arrays and quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import member, switch, whole
from ..checks import check_integers, check_optional
from ..collective import CollectiveOp
from ..dense import dense, grouped_dense
from ..quantize.quantizers import Quantizer, QuantizerSet
from ..quantize.tensors import ScaledTensor, ScaledTensor1x, ScaledTensor2x
from .base import BasePrimitive


class GemmPrimitive(BasePrimitive):
    """Products."""


class GroupedGemmPrimitive(BasePrimitive):
    """Products of rows in groups."""


def gemm(
    lhs: Array | ScaledTensor,
    rhs: Array | ScaledTensor,
    bias: Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    lhs_quantizer: Quantizer | None = None,
    rhs_quantizer: Quantizer | None = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
    *,
    fuse_bias: bool = False,
) -> Array:
    """Return lhs @ rhs (+ bias) over the contracted axes, each operand quantized by its quantizer.

    An operand may be quantized already; its values are multiplied, and the result has lhs's nominal dtype.
    fuse_bias has no effect except that it requires a bias.
    """
    switch("fuse_bias", fuse_bias)
    if fuse_bias and bias is None:
        raise ValueError("fuse_bias=True and bias=None; give a bias, or leave fuse_bias out")
    for name, quantizer in (("lhs_quantizer", lhs_quantizer), ("rhs_quantizer", rhs_quantizer)):
        check_optional(name, quantizer, Quantizer)
    member("collective_op", collective_op, CollectiveOp)
    if isinstance(lhs, ScaledTensor) or isinstance(rhs, ScaledTensor):
        dtype = _nominal_dtype(lhs)
        given = None if bias is None else bias.astype(jnp.float32)
        values = dense(_values(lhs), _values(rhs), given, contracting_dims, transpose_batch_sequence)
        return values.astype(dtype)
    quantizers = QuantizerSet(lhs_quantizer, rhs_quantizer, None)
    return dense(lhs, rhs, bias, contracting_dims, transpose_batch_sequence, quantizer_set=quantizers)


def _values(operand: Array | ScaledTensor) -> Array:
    """The values of an operand in float32."""
    if isinstance(operand, ScaledTensor2x):
        operand = operand.rowwise_tensor
    return operand.values() if isinstance(operand, ScaledTensor1x) else jnp.asarray(operand, jnp.float32)


def _nominal_dtype(operand: Any) -> Any:
    if isinstance(operand, ScaledTensor2x):
        operand = operand.rowwise_tensor
    return operand.dq_dtype if isinstance(operand, ScaledTensor1x) else operand.dtype


def grouped_gemm(
    lhs: Any,
    rhs: Any,
    group_sizes: Array,
    preferred_element_type: Any = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Array | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    group_offset: Array | None = None,
) -> Array:
    """Return the rows of group g of lhs [M, K] @ rhs[g] of rhs [G, K, N] (+ bias[g]).

    Either operand may be quantized in groups: its values are multiplied. The keywords are those of `grouped_dense`.
    """
    lhs, rhs = (x.dequantize() if hasattr(x, "dequantize") else x for x in (lhs, rhs))
    return grouped_dense(
        lhs, rhs, group_sizes, contracting_dims, bias, precision, preferred_element_type, group_offset
    )


def grouped_gemm_copy_group_sizes(group_sizes: Array, num_gemms: int) -> Array:
    """group_sizes [num_gemms] as they are: the kernel reads them on the device, nothing is copied to the host."""
    whole("num_gemms", num_gemms)
    check_integers("group_sizes", group_sizes)
    if group_sizes.shape != (num_gemms,):
        raise ValueError(
            f"group_sizes has shape {list(group_sizes.shape)}; give one number a group, [{num_gemms}]"
        )
    return group_sizes

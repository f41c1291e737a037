"""Products of arrays and quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from ...common.checks import member, whole
from ..checks import check_floating, check_integers, check_optional, check_sizes, check_values
from ..collective import CollectiveOp
from ..dense import dense
from ..primitives.grouped_gemm import grouped_gemm as grouped_product
from ..quantize.quantizers import Quantizer, QuantizerSet
from .base import BasePrimitive


class GemmPrimitive(BasePrimitive):
    """Products."""


class GroupedGemmPrimitive(BasePrimitive):
    """Products of rows in groups."""


def gemm(
    lhs: Array,
    rhs: Array,
    bias: Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    lhs_quantizer: Quantizer | None = None,
    rhs_quantizer: Quantizer | None = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
) -> Array:
    """lhs @ rhs (+ bias) over the contracted axes, each quantized by its quantizer."""
    for name, quantizer in (("lhs_quantizer", lhs_quantizer), ("rhs_quantizer", rhs_quantizer)):
        check_optional(name, quantizer, Quantizer)
    member("collective_op", collective_op, CollectiveOp)
    quantizers = QuantizerSet(lhs_quantizer, rhs_quantizer, None)
    return dense(lhs, rhs, bias, contracting_dims, transpose_batch_sequence, quantizer_set=quantizers)


def grouped_gemm(lhs: Any, rhs: Any, group_sizes: Array, preferred_element_type: Any = None) -> Array:
    """rows of group g of lhs [M, K] @ rhs[g] of rhs [G, K, N]; either may be quantized in groups."""
    values = [x.dequantize() if hasattr(x, "dequantize") else x for x in (lhs, rhs)]
    for name, array, ndim in (("lhs", values[0], 2), ("rhs", values[1], 3)):
        check_values(name, array)
        if array.ndim != ndim:
            raise ValueError(f"{name} has shape {array.shape}; give lhs [M, K] and rhs [G, K, N]")
    if values[0].shape[1] != values[1].shape[1]:
        raise ValueError(
            f"lhs {values[0].shape} and rhs {values[1].shape} differ in K; give [M, K] and [G, K, N]"
        )
    check_sizes("group_sizes", group_sizes, values[1].shape[0], values[0].shape[0])
    dtype = (
        values[0].dtype
        if preferred_element_type is None
        else check_floating("preferred_element_type", preferred_element_type)
    )
    return grouped_product(values[0], values[1].astype(values[0].dtype), group_sizes, dtype)


def grouped_gemm_copy_group_sizes(group_sizes: Array, num_gemms: int) -> Array:
    """group_sizes [num_gemms] as they are: the kernel reads them on the device, nothing is copied to the host."""
    whole("num_gemms", num_gemms)
    check_integers("group_sizes", group_sizes)
    if group_sizes.shape != (num_gemms,):
        raise ValueError(
            f"group_sizes has shape {list(group_sizes.shape)}; give one number a group, [{num_gemms}]"
        )
    return group_sizes

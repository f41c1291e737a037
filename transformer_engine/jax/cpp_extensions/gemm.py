"""Products of arrays and quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..collective import CollectiveOp
from ..dense import dense
from ..primitives.grouped_gemm import grouped_gemm as grouped_product
from ..quantize.quantizers import Quantizer, QuantizerSet


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
    quantizers = QuantizerSet(lhs_quantizer, rhs_quantizer, None)
    return dense(lhs, rhs, bias, contracting_dims, transpose_batch_sequence, quantizer_set=quantizers)


def grouped_gemm(lhs: Any, rhs: Any, group_sizes: Array, preferred_element_type: Any = None) -> Array:
    """rows of group g of lhs [M, K] @ rhs[g] of rhs [G, K, N]; either may be quantized in groups."""
    values = [x.dequantize() if hasattr(x, "dequantize") else x for x in (lhs, rhs)]
    dtype = jnp.dtype(values[0].dtype if preferred_element_type is None else preferred_element_type)
    return grouped_product(values[0], values[1].astype(values[0].dtype), group_sizes, dtype)

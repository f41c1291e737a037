"""Grouped products by XLA's ragged products, in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from .request import GroupedGemmRequest, Scales

_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def of_rows(
    a: Array,
    b: Array,
    group_sizes: Array,
    scales: Scales,
    dtype: jnp.dtype,
    features_first: bool,
    exact: bool,
) -> Array:
    """See `grouped_gemm`; every sum is in float32."""
    if features_first:
        b = jnp.swapaxes(b, 1, 2)
    if scales is not None:
        # Both scales of a group belong to its matrix.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32) * (scales[0] * scales[1])[:, None, None]
    product = lax.ragged_dot(
        a, b, group_sizes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return product.astype(dtype)


def over_rows(a: Array, b: Array, group_sizes: Array, scales: Scales, dtype: jnp.dtype) -> Array:
    """See `grouped_contraction`."""
    if scales is not None:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = lax.ragged_dot_general(
        a, b, group_sizes, _CONTRACT_ROWS, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if scales is not None:
        product = product * (scales[0] * scales[1])[:, None, None]
    return product.astype(dtype)


BACKEND = Backend[GroupedGemmRequest](
    "ragged_dot", bind=lambda request: over_rows if request.contracts_rows else of_rows
)

"""Grouped products by XLA's ragged products, in float32."""

from __future__ import annotations

import jax
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
        product = _contracted(a, b, group_sizes)
    else:
        product = _differentiable(a, b, group_sizes)
    if scales is not None:
        product = product * (scales[0] * scales[1])[:, None, None]
    return product.astype(dtype)


def _contracted(a: Array, b: Array, group_sizes: Array) -> Array:
    return lax.ragged_dot_general(
        a, b, group_sizes, _CONTRACT_ROWS, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


# JAX has no derivative of a ragged product that contracts rows; it is made of those of rows, which have one.
_differentiable = jax.custom_vjp(_contracted)


def _forward(a: Array, b: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _differentiable(a, b, group_sizes), (a, b, group_sizes)


def _backward(saved: tuple[Array, Array, Array], dout: Array) -> tuple[Array, Array, None]:
    a, b, group_sizes = saved
    da = of_rows(b, dout, group_sizes, None, a.dtype, True, True)
    return da, of_rows(a, dout, group_sizes, None, b.dtype, False, True), None


_differentiable.defvjp(_forward, _backward)


BACKEND = Backend[GroupedGemmRequest](
    "ragged_dot", bind=lambda request: over_rows if request.contracts_rows else of_rows
)

"""Products of rows in groups with one matrix a group, and the gradients of those matrices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Table
from . import reference
from .request import GroupedGemmRequest

__all__ = ["TABLE", "GroupedGemmRequest", "grouped_contraction", "grouped_gemm"]

TABLE: Table[GroupedGemmRequest] = Table("jax_grouped_gemm", (reference.BACKEND,))


def grouped_gemm(a: Array, b: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """out [M, N] in dtype: rows of group g of a [M, K] @ b[g] of b [G, K, N]; rows behind the last group are zero."""
    request = GroupedGemmRequest(b.shape[0], a.shape[0], b.shape[2], a.shape[1], a.dtype, False)
    return TABLE.bind(request)(a, b, group_sizes, dtype)


def grouped_contraction(a: Array, b: Array, group_sizes: Array, dtype: jnp.dtype) -> Array:
    """out [G, K, N] in dtype: out[g] = (rows of group g of a [M, K]).T @ (those of b [M, N])."""
    groups = group_sizes.shape[0]
    request = GroupedGemmRequest(groups, a.shape[0], b.shape[1], a.shape[1], a.dtype, True)
    return TABLE.bind(request)(a, b, group_sizes, dtype)

"""Products of rows in groups with one matrix a group, and the gradients of those matrices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .request import GroupedGemmRequest, Scales

__all__ = ["TABLE", "GroupedGemmRequest", "Scales", "grouped_contraction", "grouped_gemm"]

TABLE: Table[GroupedGemmRequest] = Table("jax_grouped_gemm", (triton.BACKEND, reference.BACKEND))


def grouped_gemm(
    a: Array,
    b: Array,
    group_sizes: Array,
    dtype: jnp.dtype,
    scales: Scales = None,
    features_first: bool = False,
    exact: bool = True,
) -> Array:
    """out [M, N] in dtype: rows of group g of a [M, K] @ b[g] of b [G, K, N]; rows behind the last group are zero.

    scales           float32 [G] of a and of b, where they are codes
    features_first   b is [G, N, K]
    exact            partial sums of codes are promoted to float32; False allows the tensor cores' faster accumulation
    """
    groups, n = b.shape[0], b.shape[1 if features_first else 2]
    dtype = jnp.dtype(dtype)
    return compute(
        TABLE,
        lambda platform: GroupedGemmRequest(
            groups, a.shape[0], n, a.shape[1], a.dtype, dtype, False, features_first, scales is not None, platform
        ),
        a, b, group_sizes, scales, dtype=dtype, features_first=features_first, exact=exact,
    )  # fmt: skip


def grouped_contraction(
    a: Array, b: Array, group_sizes: Array, dtype: jnp.dtype, scales: Scales = None
) -> Array:
    """out [G, K, N] in dtype: out[g] = (rows of group g of a [M, K]).T @ (those of b [M, N]); scales as above."""
    groups, dtype = group_sizes.shape[0], jnp.dtype(dtype)
    return compute(
        TABLE,
        lambda platform: GroupedGemmRequest(
            groups, a.shape[0], b.shape[1], a.shape[1], a.dtype, dtype, True, False, scales is not None, platform
        ),
        a, b, group_sizes, scales, dtype=dtype,
    )  # fmt: skip

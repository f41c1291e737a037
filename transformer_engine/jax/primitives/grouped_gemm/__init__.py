"""Products of rows in groups with one matrix per group, and the gradients of those matrices."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .reference import GroupedGemmRequest, Scales

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
    """Return out [M, N]: the rows of group g of a, times b[g]; rows after the last group are zero.

    Args:
        a: Values or codes [M, K].
        b: Values or codes [G, K, N].
        group_sizes: Rows per group, integers [G].
        dtype: dtype of the result.
        scales: float32 [G] of a and of b, if they are codes.
        features_first: Whether b is [G, N, K].
        exact: Whether partial sums of codes are promoted to float32; False allows the faster accumulation of the tensor
            cores.
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
    """Return out [G, K, N]: out[g] = (rows of group g of a [M, K]).T @ (those of b [M, N]); see `grouped_gemm`."""
    groups, dtype = group_sizes.shape[0], jnp.dtype(dtype)
    return compute(
        TABLE,
        lambda platform: GroupedGemmRequest(
            groups, a.shape[0], b.shape[1], a.shape[1], a.dtype, dtype, True, False, scales is not None, platform
        ),
        a, b, group_sizes, scales, dtype=dtype,
    )  # fmt: skip

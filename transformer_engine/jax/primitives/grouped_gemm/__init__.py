"""Products of grouped rows with one matrix per group, and the matrices' gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend, Table
from ..platforms import compute
from . import blocks, reference, triton
from .blocks import BlockTensor, GroupedBlockRequest, group_alignment
from .reference import GroupedGemmRequest, Scales

__all__ = [
    "BLOCK_TABLE",
    "KERNELS",
    "TABLE",
    "GroupedBlockRequest",
    "GroupedGemmRequest",
    "Scales",
    "group_alignment",
    "grouped_block_contraction",
    "grouped_block_gemm",
    "grouped_contraction",
    "grouped_gemm",
]

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
    """Compute out [M, N]: the rows of group g in a, times b[g]; rows after the last group are zero.

    Args:
        a: Values or codes [M, K].
        b: Values or codes [G, K, N].
        group_sizes: Rows per group, integers [G].
        dtype: Result dtype.
        scales: float32 [G] for a and for b, if they are codes.
        features_first: Whether b is [G, N, K].
        exact: Whether partial sums over codes are promoted to float32; False allows the tensor cores' faster
            accumulation.
    """
    groups, n = b.shape[0], b.shape[1 if features_first else 2]
    dtype = jnp.dtype(dtype)
    return compute(
        TABLE,
        lambda platform: GroupedGemmRequest(
            groups,
            a.shape[0],
            n,
            a.shape[1],
            a.dtype,
            dtype,
            False,
            features_first,
            scales is not None,
            platform,
        ),
        a,
        b,
        group_sizes,
        scales,
        dtype=dtype,
        features_first=features_first,
        exact=exact,
    )


def grouped_contraction(
    a: Array, b: Array, group_sizes: Array, dtype: jnp.dtype, scales: Scales = None
) -> Array:
    """Compute out [G, K, N]: out[g] = (rows of group g in a [M, K]).T @ (its rows in b [M, N]); see `grouped_gemm`."""
    groups, dtype = group_sizes.shape[0], jnp.dtype(dtype)
    return compute(
        TABLE,
        lambda platform: GroupedGemmRequest(
            groups,
            a.shape[0],
            b.shape[1],
            a.shape[1],
            a.dtype,
            dtype,
            True,
            False,
            scales is not None,
            platform,
        ),
        a,
        b,
        group_sizes,
        scales,
        dtype=dtype,
    )


def _decode_rows(
    a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype, features_first: bool
) -> Array:
    """Compute `grouped_block_gemm` on values in the codes' nominal dtype."""
    return grouped_gemm(
        a.dequantize(), b.dequantize(), group_sizes, dtype, features_first=features_first
    )


def _decode_contraction(
    a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype
) -> Array:
    """Compute `grouped_block_contraction` on values in the codes' nominal dtype."""
    return grouped_contraction(a.dequantize(), b.dequantize(), group_sizes, dtype)


BLOCK_TABLE: Table[GroupedBlockRequest] = Table(
    "jax_grouped_block_gemm",
    (
        blocks.DOT_SCALED,
        blocks.TRITON,
        Backend(
            "dequantized",
            bind=lambda request: _decode_contraction if request.contracts_rows else _decode_rows,
        ),
    ),
)

# Backends that compute all groups in one launch, by operation.
KERNELS = {
    TABLE.operation: (triton.BACKEND.name,),
    BLOCK_TABLE.operation: (blocks.DOT_SCALED.name, blocks.TRITON.name),
}


def grouped_block_gemm(
    a: BlockTensor,
    b: BlockTensor,
    group_sizes: Array,
    dtype: jnp.dtype,
    features_first: bool = False,
) -> Array:
    """Compute out [M, N]: the rows of group g in a, times b[g]; rows after the last group are zero.

    Args:
        a: Block-scaled codes for grouped rows, contracted along the columns.
        b: Block-scaled codes for a stack [G, K, N], contracted along K.
        group_sizes: Rows per group, integers [G].
        dtype: Result dtype.
        features_first: Whether b is [G, N, K].
    """

    def request(platform: str) -> GroupedBlockRequest:
        rows, stack = _shapes(a, b)
        (groups, n, k), m = stack.codes.shape, a.shape[0]
        return _request(
            rows,
            stack,
            (groups, m, n, k),
            dtype,
            contracts_rows=False,
            has_unreadable_padding=rows.codes.shape[0] != m,
            platform=platform,
        )

    dtype = jnp.dtype(dtype)
    return compute(
        BLOCK_TABLE, request, a, b, group_sizes, dtype=dtype, features_first=features_first
    )


def grouped_block_contraction(
    a: BlockTensor, b: BlockTensor, group_sizes: Array, dtype: jnp.dtype
) -> Array:
    """Compute out [G, K, N]: out[g] = (rows of group g in a [M, K]).T @ (its rows in b [M, N]).

    Args:
        a: Block-scaled codes for grouped rows, contracted along the rows.
        b: Block-scaled codes for the other grouped rows, contracted along the rows.
        group_sizes: Rows per group, integers [G].
        dtype: Result dtype.
    """

    def request(platform: str) -> GroupedBlockRequest:
        left, right = _shapes(a, b)
        (k, rows), n = left.codes.shape, right.codes.shape[0]
        return _request(
            left,
            right,
            (group_sizes.shape[0], rows, n, k),
            dtype,
            contracts_rows=True,
            has_unreadable_padding=False,
            platform=platform,
        )

    dtype = jnp.dtype(dtype)
    return compute(BLOCK_TABLE, request, a, b, group_sizes, dtype=dtype)


def _shapes(a: BlockTensor, b: BlockTensor) -> tuple[Any, Any]:
    """Operands for two tensors with shapes and dtypes in place of arrays."""
    return jax.eval_shape(lambda a, b: (a.operand(), b.operand()), a, b)


def _request(
    a: Any,
    b: Any,
    extents: tuple[int, int, int, int],
    dtype: jnp.dtype,
    contracts_rows: bool,
    has_unreadable_padding: bool,
    platform: str,
) -> GroupedBlockRequest:
    """Build the request for two operands; extents: groups, m, n and k."""
    assert a.format is not None and b.format is not None
    return GroupedBlockRequest(
        *extents,
        a_format=a.format,
        b_format=b.format,
        code_dtypes=(jnp.dtype(a.codes.dtype), jnp.dtype(b.codes.dtype)),
        result_dtype=dtype,
        contracts_rows=contracts_rows,
        has_unreadable_padding=has_unreadable_padding,
        transformed=(a.hadamard, b.hadamard),
        platform=platform,
    )

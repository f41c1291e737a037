"""Matrix product out [*M, *N] = a [*M, *K] @ b [*N, *K].T for operands with or without codes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ....common.dispatch import Table
from ..operand import Operand
from ..platforms import WithOptions, bind_by_platform, call_by_platform
from ..quantize import decoded as decoded_values
from ..quantize import inverse_transform
from . import codes_product, decoded, float8, reference, scaled_codes
from .request import GemmRequest

__all__ = ["TABLE", "GemmRequest", "gemm"]

TABLE: Table[GemmRequest] = Table(
    "jax_gemm",
    (
        float8.SCALED,
        codes_product.GLUON,
        codes_product.TRITON,
        float8.DIRECT,
        reference.DOT,
        scaled_codes.DOT_SCALED,
        scaled_codes.SCALED_MATMUL,
        decoded.WIDEN,
        decoded.BACKEND,
        reference.BACKEND,
    ),
)
NAME = "transformer_engine_gemm"  # checkpoint_name for every product, for recomputation policies


def gemm(a: Operand, b: Operand, dtype: jnp.dtype, exact: bool = True) -> Array:
    """Compute the product a @ b.T, contracted over the last axes of both operands.

    If only one operand is Hadamard transformed, its values are transformed back before the product. The function is
    not differentiable; forward and backward rules call it.

    Args:
        a: Operand [*M, *K].
        b: Operand [*N, *K].
        dtype: dtype of the product.
        exact: Whether partial sums are promoted to float32; False allows the faster accumulation of the tensor cores.

    Returns:
        The product [*M, *N].

    Raises:
        ValueError: The contracted extents of the operands differ.
    """
    contracted = [operand.codes.shape[operand.axis :] for operand in (a, b)]
    if contracted[0] != contracted[1]:
        extents = " and ".join(" x ".join(map(str, shape)) for shape in contracted)
        raise ValueError(f"the operands contract {extents} elements; both must end in the same K")
    if a.hadamard is not b.hadamard:
        transformed = a if a.hadamard else b
        values = decoded_values(transformed)
        matrix = inverse_transform(values.reshape(transformed.rows, transformed.depth))
        restored = Operand(
            matrix.reshape(values.shape), dtype=transformed.dtype, axis=transformed.axis
        )
        a, b = (restored, b) if a.hadamard else (a, restored)
    dtype = jnp.dtype(dtype)
    calls = bind_by_platform(TABLE, lambda platform: GemmRequest.of(a, b, dtype, exact, platform))
    options = (("dtype", dtype), ("exact", exact))
    cuda, cpu = (WithOptions(calls[platform], options) for platform in ("cuda", "cpu"))
    if cuda == cpu:
        return checkpoint_name(_one_program(a, b, cpu), NAME)
    return checkpoint_name(call_by_platform(a, b, cuda=cuda, default=cpu), NAME)


@functools.partial(jax.jit, static_argnames=("product",))
def _one_program(a: Operand, b: Operand, product: WithOptions) -> Array:
    """Compute the product as one program. In eager mode, a code product takes seconds operation by operation."""
    return product(a, b)

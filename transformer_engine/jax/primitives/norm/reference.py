"""Norm request, and its float32 reference.

y = (x - E[x]) * rsqrt(Var[x] + eps) * gamma + beta (layernorm) and y = x * rsqrt(E[x²] + eps) * gamma (rmsnorm).

Layer Normalization: Ba, Kiros, Hinton, arXiv:1607.06450. Root Mean Square Layer Normalization: Zhang, Sennrich,
arXiv:1910.07467. The variance comes from centred values (two passes): a large mean does not cancel it away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend


class NormRequest(NamedTuple):
    """Properties of a norm over an array's last axis that determine its backend.

    Attributes:
        operation: "forward" or "backward".
        width: Size of the last axis.
        dtype: Array dtype.
        rows: Product over the other axes.
        platform: Platform of the program, "cpu" or "cuda".
    """

    operation: str
    width: int
    dtype: jnp.dtype
    rows: int
    platform: str

    @classmethod
    def of(cls, operation: str, x: Array, platform: str) -> NormRequest:
        """Build the request for an operation on x."""
        return cls(operation, x.shape[-1], x.dtype, prod(x.shape[:-1]), platform)


@functools.partial(jax.jit, static_argnames=("centered", "zero_centered", "epsilon"))
def forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """Compute y = (x - mean) * rstdev * gamma + beta, mean and rstdev; see `norm_forward`."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True) if centered else None
    if mean is not None:
        wide = wide - mean
    rstdev = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    y = wide * rstdev * _broadcast_parameter(gamma, x.ndim, zero_centered)
    if beta is not None:
        y = y + _broadcast_parameter(beta, x.ndim)
    return y.astype(x.dtype), mean, rstdev


@functools.partial(jax.jit, static_argnames=("zero_centered", "dtype"))
def backward(
    dy: Array,
    x: Array,
    mean: Array | None,
    rstdev: Array,
    gamma: Array,
    add: Array | None,
    zero_centered: bool,
    dtype: str,
) -> tuple[Array, Array, Array]:
    """Compute dx = rstdev * (g - E[g] - xhat * E[g * xhat]) + add, dgamma = Σ dy * xhat and dbeta = Σ dy.

    g = dy * gamma; rmsnorm has no term E[g].
    """
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    normalized = (wide if mean is None else wide - mean) * rstdev
    g = dy * _broadcast_parameter(gamma, x.ndim, zero_centered)
    inner = g - normalized * (g * normalized).mean(axis=-1, keepdims=True)
    if mean is not None:
        inner = inner - g.mean(axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dgamma, dbeta = (dy * normalized).sum(axis=rows), dy.sum(axis=rows)
    dx = rstdev * inner
    if add is not None:
        dx = dx + add.astype(jnp.float32)
    return dx.astype(x.dtype), dgamma.astype(dtype), dbeta.astype(dtype)


def _broadcast_parameter(parameter: Array, ndim: int, zero_centered: bool = False) -> Array:
    """Convert a parameter [width] to float32 [1, .., width]: jax_numpy_rank_promotion may be "raise"."""
    wide = lax.expand_dims(parameter.astype(jnp.float32), range(ndim - 1))
    return wide + 1.0 if zero_centered else wide


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}


BACKEND = Backend[NormRequest]("reference", bind=lambda request: OPERATIONS[request.operation])

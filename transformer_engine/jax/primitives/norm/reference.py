"""y = (x - E[x]) * rsqrt(Var[x] + eps) * gamma + beta and y = x * rsqrt(E[x²] + eps) * gamma, in float32.

Layer Normalization: Ba, Kiros, Hinton, arXiv:1607.06450. Root Mean Square Layer Normalization: Zhang,
Sennrich, arXiv:1910.07467. The variance is that of the centred values (two passes): a large mean does not cancel it
away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....common.dispatch import Backend
from .request import NormRequest


@functools.partial(jax.jit, static_argnames=("centered", "zero_centered", "epsilon"))
def forward(
    x: Array, gamma: Array, beta: Array | None, centered: bool, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """y = (x - mean) * rstdev * gamma + beta; mean, rstdev float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True) if centered else None
    if mean is not None:
        wide = wide - mean
    rstdev = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + epsilon)
    y = wide * rstdev * _gamma(gamma, zero_centered, x.ndim)
    if beta is not None:
        y = y + _of_rank(beta, x.ndim)
    return y.astype(x.dtype), mean, rstdev


@functools.partial(jax.jit, static_argnames=("zero_centered", "dtype"))
def backward(
    dy: Array, x: Array, mean: Array | None, rstdev: Array, gamma: Array, add: Array | None, zero_centered: bool,
    dtype: str,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dx = rstdev * (g - E[g] - xhat * E[g * xhat]) + add, g = dy * gamma, E[g] of layernorm alone.

    dgamma = Σ dy * xhat
    """
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    normalized = (wide if mean is None else wide - mean) * rstdev
    g = dy * _gamma(gamma, zero_centered, x.ndim)
    inner = g - normalized * (g * normalized).mean(axis=-1, keepdims=True)
    if mean is not None:
        inner = inner - g.mean(axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dgamma, dbeta = (dy * normalized).sum(axis=rows), dy.sum(axis=rows)
    dx = rstdev * inner
    if add is not None:
        dx = dx + add.astype(jnp.float32)
    return dx.astype(x.dtype), dgamma.astype(dtype), dbeta.astype(dtype)


def _gamma(gamma: Array, zero_centered: bool, ndim: int) -> Array:
    wide = _of_rank(gamma, ndim)
    return wide + 1.0 if zero_centered else wide


def _of_rank(parameter: Array, ndim: int) -> Array:
    """A parameter [width] as float32 [1, .., width], for jax_numpy_rank_promotion may be "raise"."""
    return lax.expand_dims(parameter.astype(jnp.float32), range(ndim - 1))


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}


BACKEND = Backend[NormRequest]("reference", bind=lambda request: OPERATIONS[request.operation])

"""y [..., F] = product over i of f_i(x [..., i, F]) in float32.

Sources: GELU with tanh, arXiv:1606.08415; gated units, arXiv:2002.05202; squared ReLU, arXiv:2109.08668;
clamped SwiGLU, the open-weight GPT-OSS model, arXiv:2508.10925.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from .request import ActivationParams, ActivationRequest

_CURVES: dict[str, Callable[[Array, ActivationParams], Array]] = {
    "gelu": lambda x, p: jax.nn.gelu(x, approximate=True),
    "silu": lambda x, p: jax.nn.silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "quick_gelu": lambda x, p: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x, p: jnp.square(jax.nn.relu(x)),
    "linear": lambda x, p: x,
    "clamped_silu": lambda x, p: _swish(jnp.minimum(x, p.limit), p.alpha),
    "clamped_linear": lambda x, p: jnp.clip(x, -p.limit, p.limit) + p.glu_linear_offset,
}


def _swish(x: Array, alpha: float) -> Array:
    return x * jax.nn.sigmoid(alpha * x)


def _value(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    wide = x.astype(jnp.float32)
    y = _CURVES[names[0]](wide[..., 0, :], params)
    for place, name in enumerate(names[1:], 1):
        y = y * _CURVES[name](wide[..., place, :], params)
    return y.astype(x.dtype)


forward = functools.partial(jax.jit, static_argnames=("names", "params"))(_value)


@functools.partial(jax.jit, static_argnames=("names", "params"))
def backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """dx = dy * f'(x)."""
    _, pullback = jax.vjp(lambda x: _value(x, names, params), x)
    return pullback(dy)[0]


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}


BACKEND = Backend[ActivationRequest]("reference", bind=lambda request: OPERATIONS[request.operation])

"""(a, b) -> (a cos - b sin, b cos + a sin) for every pair, in float32; RoFormer, arXiv:2104.09864."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from .request import RopeRequest


@functools.partial(jax.jit, static_argnames=("interleaved", "sequence_first", "back"))
def run(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    """See `rotate`; back: by the angles' negatives."""
    tokens, half = angles.shape
    shape = (tokens, 1, 1, half) if sequence_first else (1, tokens, 1, half)
    cos, sin = jnp.cos(angles).reshape(shape), jnp.sin(angles).reshape(shape)
    if back:
        sin = -sin
    wide = x.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., :half], wide[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


BACKEND = Backend[RopeRequest]("reference", bind=lambda request: run)

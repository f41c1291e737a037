"""Rotation request, and its float32 reference: (a, b) -> (a cos - b sin, b cos + a sin); arXiv:2104.09864."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend


class RopeRequest(NamedTuple):
    """Rotation properties that determine its backend.

    Attributes:
        shape: Shape [b, s, h, d]; [b, s, 3, h * d] if packed.
        dtype: dtype of x.
        platform: Platform of the program, "cpu" or "cuda".
        packed: Whether x contains the queries, keys and values of a joint projection.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    platform: str
    packed: bool = False


@functools.partial(jax.jit, static_argnames=("interleaved", "sequence_first", "back"))
def run(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    """See `rotate`; with back, rotate by the negative angles."""
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
    rotated = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("heads", "interleaved", "sequence_first", "back"))
def run_packed(
    *arrays: Array, heads: int, interleaved: bool, sequence_first: bool, back: bool
) -> tuple[Array, ...]:
    """See `rotate_packed`; with back, (dq, dk, dv, angles) -> the gradient of packed."""
    *values, angles = arrays
    rotate = functools.partial(
        run, angles=angles, interleaved=interleaved, sequence_first=sequence_first, back=back
    )
    if back:
        dq, dk, dv = values
        rows = [x.reshape(*x.shape[:2], -1) for x in (rotate(dq), rotate(dk), dv)]
        return (jnp.stack(rows, axis=2),)
    packed = values[0]
    q, k, v = (packed[:, :, i].reshape(*packed.shape[:2], heads, -1) for i in range(3))
    return rotate(q), rotate(k), v


BACKEND = Backend[RopeRequest](
    "reference", bind=lambda request: run_packed if request.packed else run
)

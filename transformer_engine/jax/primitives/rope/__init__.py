"""Rotary position embedding: feature pairs rotated by angles; the gradient rotates back."""

from __future__ import annotations

import functools

import jax
from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .reference import RopeRequest

__all__ = ["TABLE", "RopeRequest", "rotate", "rotate_packed"]

TABLE: Table[RopeRequest] = Table("jax_rope", (triton.BACKEND, reference.BACKEND))


def _rotate(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    """Rotate as `rotate`, by the negative angles if back."""
    return compute(
        TABLE,
        lambda platform: RopeRequest(x.shape, x.dtype, platform),
        x,
        angles,
        interleaved=interleaved,
        sequence_first=sequence_first,
        back=back,
    )


def rotate(x: Array, angles: Array, interleaved: bool, sequence_first: bool) -> Array:
    """Rotate feature pairs by position-dependent angles.

    Args:
        x: Queries or keys [b, s, h, d]; [s, b, h, d] if sequence_first.
        angles: Rotation angles, float32 [s, d / 2].
        interleaved: Feature pairs are (2 i, 2 i + 1); otherwise (i, i + d / 2).
        sequence_first: The first axis of x is the sequence.

    Returns:
        The rotated array, with x's shape and dtype.
    """
    rotation = jax.custom_vjp(
        lambda x, angles: _rotate(x, angles, interleaved, sequence_first, False)
    )
    rotation.defvjp(
        lambda x, angles: (_rotate(x, angles, interleaved, sequence_first, False), angles),
        lambda angles, dy: (_rotate(dy, angles, interleaved, sequence_first, True), None),
    )
    return rotation(x, angles)


def rotate_packed(
    packed: Array, angles: Array, heads: int, interleaved: bool, sequence_first: bool
) -> tuple[Array, Array, Array]:
    """Split the product of a joint projection into q, k and v, and rotate q and k.

    Args:
        packed: Queries, keys and values [b, s, 3, h * d]; [s, b, 3, h * d] if sequence_first.
        angles: Rotation angles, float32 [s, d / 2].
        heads: Number of heads h.
        interleaved: Feature pairs are (2 i, 2 i + 1); otherwise (i, i + d / 2).
        sequence_first: The first axis of packed is the sequence.

    Returns:
        q, k and v, each [b, s, h, d] in packed's dtype; equal to `rotate` on the parts.
    """
    shape = (*packed.shape[:2], 3, packed.shape[3])
    dtype = packed.dtype

    def run(back: bool, *arrays: Array) -> tuple[Array, ...]:
        return compute(
            TABLE,
            lambda platform: RopeRequest(shape, dtype, platform, packed=True),
            *arrays,
            heads=heads,
            interleaved=interleaved,
            sequence_first=sequence_first,
            back=back,
        )

    split = jax.custom_vjp(functools.partial(run, False))
    split.defvjp(
        lambda packed, angles: (run(False, packed, angles), angles),
        lambda angles, gradients: (run(True, *gradients, angles)[0], None),
    )
    q, k, v = split(packed, angles)
    return q, k, v

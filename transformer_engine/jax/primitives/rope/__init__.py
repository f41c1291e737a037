"""y [b, s, h, d] = pairs of x turned by angles [s, d / 2]; the gradient turns back."""

from __future__ import annotations

import jax
from jax import Array

from ....common.dispatch import Table
from ..platforms import computed
from . import reference, triton
from .request import RopeRequest

__all__ = ["TABLE", "RopeRequest", "rotate"]

TABLE: Table[RopeRequest] = Table("jax_rope", (triton.BACKEND, reference.BACKEND))


def _turn(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    return computed(
        TABLE, lambda platform: RopeRequest(x.shape, x.dtype, platform), x, angles, interleaved=interleaved,
        sequence_first=sequence_first, back=back,
    )  # fmt: skip


def rotate(x: Array, angles: Array, interleaved: bool, sequence_first: bool) -> Array:
    """y in x's dtype of x [b, s, h, d] and angles float32 [s, d / 2].

    interleaved      pairs are (2 i, 2 i + 1); else (i, i + d / 2)
    sequence_first   x is [s, b, h, d]
    """
    rotation = jax.custom_vjp(lambda x, angles: _turn(x, angles, interleaved, sequence_first, False))
    rotation.defvjp(
        lambda x, angles: (_turn(x, angles, interleaved, sequence_first, False), angles),
        lambda angles, dy: (_turn(dy, angles, interleaved, sequence_first, True), None),
    )
    return rotation(x, angles)

"""Request of a rotation."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class RopeRequest(NamedTuple):
    """Properties of a rotation that determine its backend.

    Attributes:
        shape: Shape of x, [b, s, h, d]; [b, s, 3, h * d] if packed.
        dtype: dtype of x.
        platform: Platform of the program, "cpu" or "cuda".
        packed: Whether x contains the queries, keys and values of a joint projection.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    platform: str
    packed: bool = False

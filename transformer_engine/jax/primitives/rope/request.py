"""Request of a rotation: the shapes and dtypes that backends judge."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class RopeRequest(NamedTuple):
    """Shape and dtype of x, and the platform.

    packed: x is [b, s, 3, h * d], queries, keys and values of one product; otherwise [b, s, h, d].
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    platform: str
    packed: bool = False

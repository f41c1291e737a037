"""What a rotation is asked for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class RopeRequest(NamedTuple):
    """Shape and dtype of x, and the platform."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    platform: str

"""What a norm is asked for."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class NormRequest(NamedTuple):
    """ "forward" or "backward" over the last axis of an array."""

    operation: str
    width: int
    dtype: jnp.dtype

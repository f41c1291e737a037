"""What a norm is asked for."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class NormRequest(NamedTuple):
    """ "forward" or "backward" over the last axis of an array."""

    operation: str
    width: int
    dtype: jnp.dtype
    rows: int
    platform: str

    @classmethod
    def of(cls, operation: str, x: Array, platform: str) -> NormRequest:
        return cls(operation, x.shape[-1], x.dtype, prod(x.shape[:-1]), platform)

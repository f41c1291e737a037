"""scale = (max of a dtype / amax) / 2^margin: what delayed scaling makes of one absolute maximum."""

from __future__ import annotations

from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import described, exponent
from ..primitives.scale_update import advance_scales
from .settings import element_of


def compute_scale_from_amax(
    amax: Array, q_dtype: Any, margin: float = 0.0, scale: Array | None = None
) -> Array:
    """(max of q_dtype / amax) / 2^margin as float32 [1]; where amax is 0, inf or NaN `scale`, by default 1.

    amax, scale   float32 arrays of one number, or numbers; a scale of 0 is read as 1
    """
    exponent("margin", margin)
    amax = _one_number("amax", amax)
    old = jnp.ones(1, jnp.float32) if scale is None else _one_number("scale", scale)
    _, computed = advance_scales(
        jnp.zeros((1, 1), jnp.float32), old, amax, "most_recent", (element_of(q_dtype).maximum,), margin
    )
    return computed


def _one_number(name: str, value: Any) -> Array:
    """float32 [1]; TypeError for what is not one real number, or an array of one."""
    dtype = getattr(value, "dtype", None)
    kinds = (jnp.floating, jnp.integer)
    real = isinstance(value, Real) if dtype is None else any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if not real or np.size(value) != 1:
        raise TypeError(f"{name}={described(value)}; give one number, or an array [1] of it")
    return jnp.asarray(value, jnp.float32).reshape(1)

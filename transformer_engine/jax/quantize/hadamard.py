"""The random Hadamard transform for NVFP4's column direction, and its matrix."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import switch
from ..primitives.quantize import hadamard_transform, inverse_transform
from ..primitives.quantize.hadamard import GROUP, SIGNS
from ..runtime.checks import check_values


def apply_rht(x: Array, inverse: bool = False) -> Array:
    """Compute y [..., 16 n] = (x * signs) @ H / 4 in 16-element groups, or the inverse, in x's dtype.

    Args:
        x: Values [.., 16 n].
        inverse: Whether to apply the inverse.

    Raises:
        TypeError: x is not a value array.
        ValueError: The last axis of x does not consist of 16-element groups.
    """
    check_values("x", x)
    switch("inverse", inverse)
    if not x.ndim:
        raise ValueError(f"x has shape {x.shape}; give [..., 16 n], whose last axis is transformed")
    return inverse_transform(x) if inverse else hadamard_transform(x)


def get_wgrad_sign_vector() -> Array:
    """The 16 signs, float32."""
    return jnp.asarray(np.asarray(SIGNS, np.float32))


def get_rht_matrix() -> Array:
    """Compute diag(signs) @ H / 4 [16, 16] in bfloat16: x @ matrix transforms a group."""
    rows = np.arange(GROUP)
    ones = np.vectorize(lambda n: bin(n).count("1"))(rows[:, None] & rows[None, :])
    return jnp.asarray((np.asarray(SIGNS)[:, None] * (-1.0) ** ones) / 4, jnp.bfloat16)

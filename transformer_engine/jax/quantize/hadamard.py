"""The random Hadamard transform of NVFP4's column direction, and its matrix."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import member, switch
from ..checks import check_values
from ..primitives.quantize import hadamard_transform, inverse_transform
from ..primitives.quantize.hadamard import GROUP, SIGNS
from .scaling_modes import QuantizeLayout, ScalingMode


def apply_rht(x: Array, inverse: bool = False) -> Array:
    """Return y [..., 16 n] = (x * signs) @ H / 4 in groups of 16, or the inverse, in x's dtype.

    Args:
        x: Values [.., 16 n].
        inverse: Whether to apply the inverse.

    Raises:
        TypeError: x is not an array of values.
        ValueError: The last axis of x does not consist of groups of 16.
    """
    check_values("x", x)
    switch("inverse", inverse)
    if not x.ndim:
        raise ValueError(f"x has shape {x.shape}; give [..., 16 n], whose last axis is transformed")
    return inverse_transform(x) if inverse else hadamard_transform(x)


def get_wgrad_sign_vector() -> Array:
    """Return the 16 signs, float32."""
    return jnp.asarray(np.asarray(SIGNS, np.float32))


def get_rht_matrix() -> Array:
    """Return diag(signs) @ H / 4 [16, 16] in bfloat16: x @ matrix transforms a group."""
    rows = np.arange(GROUP)
    ones = np.vectorize(lambda n: bin(n).count("1"))(rows[:, None] & rows[None, :])
    return jnp.asarray((np.asarray(SIGNS)[:, None] * (-1.0) ** ones) / 4, jnp.bfloat16)


def should_use_rht(
    scaling_mode: ScalingMode, is_colwise: bool | None = None, q_layout: QuantizeLayout | None = None
) -> bool:
    """Return whether the NVFP4 recipe transforms codes of a mode and direction: the column-wise ones of 1-D blocks.

    The recipe does so for inputs and gradients, unless its disable_rht is True. A quantizer of its own has `use_rht`.

    Args:
        scaling_mode: Scaling mode.
        is_colwise: Whether the codes are column-wise.
        q_layout: Directions instead of is_colwise; True if they are the columns alone.

    Raises:
        ValueError: Both of is_colwise and q_layout are given, or neither.
    """
    member("scaling_mode", scaling_mode, ScalingMode)
    if (is_colwise is None) is (q_layout is None):
        raise ValueError(f"is_colwise={is_colwise} and q_layout={q_layout}; give one of them")
    if q_layout is not None:
        member("q_layout", q_layout, QuantizeLayout)
        is_colwise = q_layout.is_colwise_only
    switch("is_colwise", is_colwise)
    return bool(is_colwise) and scaling_mode.is_nvfp4_scaling and not scaling_mode.is_2d

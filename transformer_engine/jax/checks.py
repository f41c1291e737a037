"""What every function of arrays asks of its arguments before it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..common.checks import described


def check_values(name: str, array: Any) -> None:
    """TypeError unless an array holds float32, bfloat16 or float16."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"{name} is {described(array)}; it must hold float32, bfloat16 or float16, cast it")


def check_instance(name: str, value: Any, kind: type) -> None:
    """TypeError unless value is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={described(value)} is a {type(value).__name__}; give a {kind.__name__}")


def check_bias(bias: Array | None, features: Sequence[int]) -> None:
    """ValueError unless a bias is one number a feature."""
    if bias is not None and tuple(bias.shape) != tuple(features):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; it must be {tuple(features)}, one number a feature"
        )


def broadcasts(shape: Sequence[int], extents: Sequence[int]) -> bool:
    """Has a shape these extents, or 1 in place of one?"""
    return len(shape) == len(extents) and all(n in (1, m) for n, m in zip(shape, extents, strict=True))


def check_mask(mask: Any, scores: Sequence[int]) -> None:
    """TypeError or ValueError unless a mask has an element for every score [b, h, q, k], or 1 in place of an extent."""
    if getattr(mask, "dtype", None) is None:
        raise TypeError(f"mask={described(mask)}; give an array, True of which hides a key")
    if not broadcasts(mask.shape, scores):
        raise ValueError(
            f"the mask has shape {mask.shape}; it must be {tuple(scores)}, or 1 in place of an extent"
        )


def check_axis_names(name: str, axes: Sequence[str | None] | None, ndim: int) -> None:
    """ValueError unless there is one name an axis, or none at all."""
    if axes and len(axes) != ndim:
        raise ValueError(
            f"{name}={tuple(axes)} names {len(axes)} axes of {ndim}; give one name, or None, an axis"
        )

"""The activations by name, and what one call is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from ....common.checks import described, number

_CURVES = ("gelu", "silu", "relu", "quick_gelu", "squared_relu")
ACTIVATIONS = (
    *((name,) for name in _CURVES),
    *((name, "linear") for name in _CURVES),
    ("clamped_silu", "clamped_linear"),
)


@dataclass(frozen=True)
class ActivationParams:
    """Constants of ("clamped_silu", "clamped_linear"); the other activations have none."""

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    @classmethod
    def of(cls, params: ActivationParams | Mapping[str, float] | None) -> ActivationParams:
        """Themselves, or made of the dict that users write."""
        if isinstance(params, cls):
            return params
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(
                f"activation_params={described(params)} is a {type(params).__name__}; give a dict of limit, alpha and "
                "glu_linear_offset, or None"
            )
        given = dict(params or {})
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"activation_params has no {unknown[0]!r}; choose from {known}")
        for key, value in given.items():
            number(f"activation_params[{key!r}]", value)
        return cls(**{key: float(value) for key, value in given.items()})


class ActivationRequest(NamedTuple):
    """One of "forward" and "backward" of the activations called names."""

    operation: str
    names: tuple[str, ...]
    dtype: jnp.dtype
    elements: int
    platform: str

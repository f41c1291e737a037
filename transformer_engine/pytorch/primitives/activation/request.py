"""What an activation is, and what its backends are told before they say yes or no."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Activation:
    """y = f(x), or when gated y [..., F] = f(x[..., :F]) * x[..., F:]."""

    name: str
    gated: bool


ACTIVATIONS: dict[str, Activation] = {
    name: Activation(name, gated)
    for name, gated in (
        ("gelu", False),
        ("geglu", True),
        ("glu", True),
        ("qgelu", False),
        ("qgeglu", True),
        ("relu", False),
        ("reglu", True),
        ("srelu", False),
        ("sreglu", True),
        ("silu", False),
        ("swiglu", True),
        ("clamped_swiglu", True),
    )
}


@dataclass(frozen=True)
class ActivationParams:
    """Constants of clamped_swiglu; the other activations have none and ignore them."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @classmethod
    def of(cls, params: ActivationParams | Mapping[str, float] | None) -> ActivationParams:
        """Themselves, or from_mapping where a dict was put in their place."""
        return params if isinstance(params, cls) else cls.from_mapping(params)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_mapping(cls, params: Mapping[str, float] | None) -> ActivationParams:
        """From the dict users write: keys `limit`, `alpha`, `glu_linear_offset` or `offset`; else ValueError."""
        given = dict(params or {})
        known = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset", "offset": "offset"}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"activation_params has no {unknown[0]!r}; choose from {', '.join(known)}")
        return cls(**{known[key]: float(value) for key, value in given.items()})


DEFAULT_PARAMS = ActivationParams()


class ActivationRequest(NamedTuple):
    """One call on x [..., width]; backward tells the gradient from the function."""

    name: str
    backward: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

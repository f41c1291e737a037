"""Activation request, and its float32 reference: y [..., F] = product over i of f_i(x [..., i, F]).

Sources: GELU with tanh, arXiv:1606.08415; gated units, arXiv:2002.05202; squared ReLU, arXiv:2109.08668; clamped
SwiGLU, the open-weight GPT-OSS model, arXiv:2508.10925.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....common.checks import described, number
from ....common.dispatch import Backend
from ....common.numbers import with_article

_NAMES = ("gelu", "silu", "relu", "quick_gelu", "squared_relu")
ACTIVATIONS = (
    *((name,) for name in _NAMES),
    *((name, "linear") for name in _NAMES),
    ("clamped_silu", "clamped_linear"),
)


@dataclass(frozen=True)
class ActivationParams:
    """Constants for ("clamped_silu", "clamped_linear"); the other activations have none.

    Args:
        limit: Upper limit for the activated half, and limit for the other half in both directions.
        alpha: Factor in the sigmoid's argument.
        glu_linear_offset: Added to the clamped second half.
    """

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    @classmethod
    def of(cls, params: ActivationParams | Mapping[str, float] | None) -> ActivationParams:
        """Convert a record or a dict to constants; None gives the defaults.

        Raises:
            TypeError: params is neither a dict nor a record, or a value is not a number.
            ValueError: A dict key is not a constant.
        """
        if isinstance(params, cls):
            return params
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(
                f"activation_params={described(params)} is {with_article(type(params))}; give a dict of limit, alpha "
                "and glu_linear_offset, or None"
            )
        values = dict(params or {})
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            supported = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"activation_params has no {unknown[0]!r}; choose from {supported}")
        for key, value in values.items():
            number(f"activation_params[{key!r}]", value)
        return cls(**{key: float(value) for key, value in values.items()})


class ActivationRequest(NamedTuple):
    """Activation properties that determine its backend.

    Attributes:
        operation: "forward" or "backward".
        names: Activation names.
        dtype: dtype of x.
        elements: Number of elements in x.
        platform: Platform of the program, "cpu" or "cuda".
    """

    operation: str
    names: tuple[str, ...]
    dtype: jnp.dtype
    elements: int
    platform: str


_CURVES: dict[str, Callable[[Array, ActivationParams], Array]] = {
    "gelu": lambda x, p: jax.nn.gelu(x, approximate=True),
    "silu": lambda x, p: jax.nn.silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "quick_gelu": lambda x, p: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x, p: jnp.square(jax.nn.relu(x)),
    "linear": lambda x, p: x,
    # The derivative is 1 at the bounds, where jnp.minimum has 0.5.
    "clamped_silu": lambda x, p: (
        (clamped := jnp.where(x > p.limit, p.limit, x)) * jax.nn.sigmoid(p.alpha * clamped)
    ),
    "clamped_linear": lambda x, p: (
        jnp.where(x > p.limit, p.limit, jnp.where(x < -p.limit, -p.limit, x)) + p.glu_linear_offset
    ),
}


def _value(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    wide = x.astype(jnp.float32)
    y = _CURVES[names[0]](wide[..., 0, :], params)
    for index, name in enumerate(names[1:], 1):
        y = y * _CURVES[name](wide[..., index, :], params)
    return y.astype(x.dtype)


forward = functools.partial(jax.jit, static_argnames=("names", "params"))(_value)


@functools.partial(jax.jit, static_argnames=("names", "params"))
def backward(dy: Array, x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    """Compute dx = dy * f'(x)."""
    _, pullback = jax.vjp(lambda x: _value(x, names, params), x)
    return pullback(dy)[0]


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}


BACKEND = Backend[ActivationRequest](
    "reference", bind=lambda request: OPERATIONS[request.operation]
)

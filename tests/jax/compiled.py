"""Values and gradients compiled as one program each; operation by operation would cost tens of times as much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn


def values_and_gradients(function: Callable[..., Any], dy: Any, *arguments: Any) -> tuple[Any, ...]:
    """(y, *gradients of the arguments) of y = function(*arguments), its cotangent dy."""

    def both(dy, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        return y, *pullback(dy)

    return jax.jit(both)(dy, *arguments)


def variables_of(model: nn.Module, rngs: Any, *inputs: Any, **options: Any) -> Any:
    """model.init without boxes; options are static."""
    return nn.meta.unbox(jax.jit(lambda rngs, *inputs: model.init(rngs, *inputs, **options))(rngs, *inputs))

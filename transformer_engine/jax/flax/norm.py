"""LayerNorm, and the parameters for all modules with a norm."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import suggests_keywords
from ..layernorm import canonicalize_norm_type, layernorm
from ..sharding import with_sharding_constraint_by_logical_axes
from .base import Axes, Initializer, check_call, parameter


def scale_initializer(scale_init: Initializer | None, zero_centered: bool) -> Initializer:
    """The `scale_init` argument, by default ones, or zeros if 1 is added."""
    if scale_init is not None:
        return scale_init
    return nn.initializers.zeros if zero_centered else nn.initializers.ones


def norm_of_inputs(module: Any, inputs: Array) -> Array:
    """Apply the norm before a module's product, from its fields and parameters; return the inputs if it has no norm."""
    inputs = with_sharding_constraint_by_logical_axes(inputs, module.layernorm_input_axes)
    if not module.enable_layernorm:
        return inputs
    return _norm(module, inputs, module.ln_bias_init, module.ln_bias_axes)


def norm_parameters(
    module: Any, width: int, bias_init: Initializer, bias_axes: Axes
) -> tuple[Array, Array | None]:
    """Create the module's `scale` [width] and, for layernorm, `ln_bias`."""
    shape = (width,)
    scale = parameter(module, "scale", module.scale_init, module.scale_axes, shape, module.dtype)
    if canonicalize_norm_type(module.layernorm_type) != "layernorm":
        return scale, None
    return scale, parameter(module, "ln_bias", bias_init, bias_axes, shape, module.dtype)


def _norm(module: Any, x: Array, bias_init: Initializer, bias_axes: Axes) -> Array:
    """Normalize x by the module's fields and its parameters."""
    scale, bias = norm_parameters(module, x.shape[-1], bias_init, bias_axes)
    return layernorm(
        x, scale, bias, module.layernorm_type, module.zero_centered_gamma, module.epsilon
    )


@suggests_keywords
class LayerNorm(nn.Module):
    """Normalize the last axis of x by LayerNorm or RMSNorm; parameters `scale` and `ln_bias`.

    Args:
        epsilon: Added to the variance or the mean square.
        layernorm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: Multiply by 1 + scale.
        scale_init: Initializer for scale, by default ones, or zeros with zero_centered_gamma.
        scale_axes: Logical axis names for scale.
        bias_init: Initializer for ln_bias.
        bias_axes: Logical axis names for ln_bias.
        dtype: Parameter dtype.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ("embed",)
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self.scale_init = scale_initializer(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize x; the result has x's shape and dtype.

        Args:
            x: Values [.., width].
        """
        check_call(self, x=x)
        return _norm(self, x, self.bias_init, self.bias_axes)

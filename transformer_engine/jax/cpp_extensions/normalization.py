"""Norms with their statistics, quantized where a quantizer is given."""

from __future__ import annotations

from typing import Any

from jax import Array

from ..layernorm import check_norm
from ..primitives.norm import norm_forward
from ..quantize.quantizers import Quantizer
from ..quantize.scaling_modes import ScalingMode
from .base import BasePrimitive
from .quantization import by_reference, quantize


class NormFwdPrimitive(BasePrimitive):
    """Norms."""


class NormBwdPrimitive(BasePrimitive):
    """Gradients of norms."""


def layernorm_fwd(
    x: Array,
    gamma: Array,
    beta: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
) -> tuple[Any, Array, Array]:
    """(y, mean [..], rstdev [..]), statistics in float32."""
    check_norm(x, gamma, beta, "layernorm", zero_centered_gamma, epsilon)
    y, mean, rstdev = norm_forward(x, gamma, beta, True, zero_centered_gamma, float(epsilon))
    assert mean is not None
    return quantize(y, quantizer), mean[..., 0], rstdev[..., 0]


def rmsnorm_fwd(
    x: Array, gamma: Array, zero_centered_gamma: bool, epsilon: float, quantizer: Quantizer | None = None
) -> tuple[Any, Array]:
    """(y, rstdev [..]), rstdev in float32."""
    check_norm(x, gamma, None, "rmsnorm", zero_centered_gamma, epsilon)
    y, _, rstdev = norm_forward(x, gamma, None, False, zero_centered_gamma, float(epsilon))
    return quantize(y, quantizer), rstdev[..., 0]


def is_norm_zero_centered_gamma_in_weight_dtype(scaling_mode: ScalingMode) -> bool:
    """Is the 1 of 1 + gamma added in gamma's dtype? Under no scaling mode: in float32."""
    return False


_jax_layernorm = by_reference(layernorm_fwd)
_jax_rmsnorm = by_reference(rmsnorm_fwd)

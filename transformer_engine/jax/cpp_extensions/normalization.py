"""Norms with their statistics, quantized where a quantizer is given."""

from __future__ import annotations

from typing import Any

from jax import Array

from ..primitives.norm import norm_forward
from ..quantize.quantizers import Quantizer
from .quantization import quantize


def layernorm_fwd(
    x: Array,
    gamma: Array,
    beta: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None,
) -> tuple[Any, Array, Array]:
    """(y, mean [..], rstdev [..]), statistics in float32."""
    y, mean, rstdev = norm_forward(x, gamma, beta, True, zero_centered_gamma, float(epsilon))
    assert mean is not None
    return quantize(y, quantizer), mean[..., 0], rstdev[..., 0]


def rmsnorm_fwd(
    x: Array, gamma: Array, zero_centered_gamma: bool, epsilon: float, quantizer: Quantizer | None
) -> tuple[Any, Array]:
    """(y, rstdev [..]), rstdev in float32."""
    y, _, rstdev = norm_forward(x, gamma, None, False, zero_centered_gamma, float(epsilon))
    return quantize(y, quantizer), rstdev[..., 0]

"""The norm, then the quantization of what it answers."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Backend
from ..norm import norm_forward
from ..quantize import Quantized, QuantizeSpec, quantize
from .request import NormCodesRequest


def run(
    x: Array,
    gamma: Array,
    beta: Array | None,
    scale: Array | None,
    centered: bool,
    zero_centered: bool,
    epsilon: float,
    spec: QuantizeSpec,
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    y, mean, rstdev = norm_forward(x, gamma, beta, centered, zero_centered, epsilon)
    return quantize(y.reshape(-1, x.shape[-1]), spec, scale=scale), mean, rstdev


BACKEND = Backend[NormCodesRequest]("separate", bind=lambda request: run)

"""The norm, then the quantization of what it answers."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Backend
from ..norm import norm_forward
from ..quantize import Quantized, quantize
from .request import How, NormCodesRequest


def run(
    x: Array, gamma: Array, beta: Array | None, multiplier: Array | None, how: How
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    y, mean, rstdev = norm_forward(x, gamma, beta, how.centered, how.zero_centered, how.epsilon)
    return quantize(y.reshape(-1, x.shape[-1]), how.spec, multiplier=multiplier), mean, rstdev


BACKEND = Backend[NormCodesRequest]("separate", bind=lambda request: run)

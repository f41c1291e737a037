"""The norm, then the quantization of what it answers."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Backend
from ..norm import norm_forward
from ..quantize import Quantized, quantize
from ..several_axes import with_rows
from .request import How, NormCodesRequest


def run(
    x: Array, gamma: Array, beta: Array | None, multiplier: Array | None, how: How
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    y, mean, rstdev = norm_forward(x, gamma, beta, how.centered, how.zero_centered, how.epsilon)
    of_rows, axis = with_rows(y, 1)
    made = quantize(of_rows, how.spec, multiplier=multiplier, axis=axis)
    return made, mean, rstdev


BACKEND = Backend[NormCodesRequest]("separate", bind=lambda request: run)

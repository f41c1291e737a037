"""codes = quantize(layernorm(x)) or quantize(rmsnorm(x)), on arrays [..., width]."""

from __future__ import annotations

from math import prod

from jax import Array

from ....common.dispatch import Table
from ..norm import NormRequest
from ..platforms import compute
from ..quantize import Cast, Quantized, Request
from . import separate, triton
from .request import How, NormCodesRequest

__all__ = ["TABLE", "NormCodesRequest", "norm_codes"]

TABLE: Table[NormCodesRequest] = Table("jax_norm_codes", (triton.BACKEND, separate.BACKEND))


def norm_codes(
    x: Array,
    gamma: Array,
    beta: Array | None,
    cast: Cast,
    centered: bool,
    zero_centered: bool,
    epsilon: float,
) -> tuple[Quantized, Array | None, Array]:
    """Codes of y [*rows, width], see `Quantized`, y rounded to x's dtype; mean (None unless centered) and rstdev.

    On a GPU they are made where y is, which is never stored, unless one scale is to be made of its maximum: that is
    found on the way.
    """
    shape = (prod(x.shape[:-1]), x.shape[-1])

    def request(platform: str) -> NormCodesRequest:
        made = Request(cast.spec, shape, x.dtype, platform, cast.multiplier is not None, max(x.ndim - 1, 1))
        return NormCodesRequest(NormRequest.of("forward", x, platform), made, centered)

    how = How(centered, zero_centered, epsilon, cast.spec)
    return compute(TABLE, request, x, gamma, beta, cast.multiplier, how=how)

"""codes = quantize(layernorm(x)) or quantize(rmsnorm(x)), on arrays [..., width]."""

from __future__ import annotations

from math import prod

from jax import Array

from ....common.dispatch import Table
from ..norm import NormRequest
from ..platforms import compute
from ..quantize import OutputCast, Quantized, QuantizeRequest
from . import separate, triton
from .separate import CodedNorm, NormCodesRequest

__all__ = ["TABLE", "NormCodesRequest", "norm_codes"]

TABLE: Table[NormCodesRequest] = Table("jax_norm_codes", (triton.BACKEND, separate.BACKEND))


def norm_codes(
    x: Array,
    gamma: Array,
    beta: Array | None,
    cast: OutputCast,
    centered: bool,
    zero_centered: bool,
    epsilon: float,
) -> tuple[Quantized, Array | None, Array]:
    """Normalize x and quantize the result y [*rows, width]; also return mean and rstdev.

    y is rounded to x's dtype before it is quantized; see `Quantized`. The mean is None unless the norm is centered.

    On a GPU the kernel that computes y writes the codes, and y is not stored. With one scale from the maximum of y, the
    kernel stores y and finds the maximum, and a second kernel writes the codes. See `norm_forward` for the arguments.
    """
    shape = (prod(x.shape[:-1]), x.shape[-1])

    def request(platform: str) -> NormCodesRequest:
        cast_request = QuantizeRequest(
            cast.spec, shape, x.dtype, platform, cast.multiplier is not None, max(x.ndim - 1, 1)
        )
        return NormCodesRequest(NormRequest.of("forward", x, platform), cast_request, centered)

    coded = CodedNorm(centered, zero_centered, epsilon, cast.spec)
    return compute(TABLE, request, x, gamma, beta, cast.multiplier, coded=coded)

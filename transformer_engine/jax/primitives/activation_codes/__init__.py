"""codes = quantize(f(x [..., n, F])), and its gradient's codes with column sums."""

from __future__ import annotations

from math import prod
from typing import Any

from jax import Array

from ....common.dispatch import Table
from ..activation import ActivationParams, ActivationRequest
from ..kernels import sums_dtype
from ..platforms import compute
from ..quantize import OutputCast, Quantized, QuantizeRequest
from . import separate, triton
from .separate import ActivationCodesRequest, CodedActivation

__all__ = ["TABLE", "ActivationCodesRequest", "activation_backward_codes", "activation_codes"]

TABLE: Table[ActivationCodesRequest] = Table(
    "jax_activation_codes", (triton.BACKEND, separate.BACKEND)
)


def activation_codes(
    x: Array, cast: OutputCast, names: tuple[str, ...], params: ActivationParams
) -> Quantized:
    """Quantize y [*rows, F] rounded to x's dtype; see `Quantized`.

    On a GPU the kernel that computes y writes the codes, and y is not stored. With one scale from the maximum of y, the
    kernel stores y, and a second kernel writes the codes.
    """
    coded = CodedActivation(names, params, cast.spec)
    return compute(
        TABLE,
        lambda platform: _request("forward", x, cast, coded, platform),
        x,
        cast.multiplier,
        coded=coded,
    )


def activation_backward_codes(
    dy: Array,
    x: Array,
    cast: OutputCast,
    names: tuple[str, ...],
    params: ActivationParams,
    sums: Any | None,
) -> tuple[Quantized, Array | None]:
    """Quantize dx [*rows, n, F], see `Quantized`, and compute its column sums [n, F] in dtype `sums`, if any."""
    coded = CodedActivation(names, params, cast.spec, None if sums is None else sums_dtype(sums))
    codes, total = compute(
        TABLE,
        lambda platform: _request("backward", x, cast, coded, platform),
        dy,
        x,
        cast.multiplier,
        coded=coded,
    )
    return codes, None if total is None else total.astype(sums)


def _request(
    operation: str, x: Array, cast: OutputCast, coded: CodedActivation, platform: str
) -> ActivationCodesRequest:
    width = x.shape[-1] * (len(coded.names) if operation == "backward" else 1)
    shape, has_multiplier = (prod(x.shape[:-2]), width), cast.multiplier is not None
    cast_request = QuantizeRequest(
        cast.spec, shape, x.dtype, platform, has_multiplier, max(x.ndim - 2, 1)
    )
    activation = ActivationRequest(operation, coded.names, x.dtype, x.size, platform)
    return ActivationCodesRequest(activation, cast_request, x.shape[-1], coded.sums is not None)

"""codes = quantize(f(x [..., n, F])), and the codes of its gradient with the sums of their columns."""

from __future__ import annotations

from math import prod
from typing import Any

from jax import Array

from ....common.dispatch import Table
from ..activation import ActivationParams, ActivationRequest
from ..kernels import sums_dtype
from ..platforms import compute
from ..quantize import Cast, Quantized, Request
from . import separate, triton
from .request import ActivationCodesRequest, How

__all__ = ["TABLE", "ActivationCodesRequest", "activation_backward_codes", "activation_codes"]

TABLE: Table[ActivationCodesRequest] = Table("jax_activation_codes", (triton.BACKEND, separate.BACKEND))


def activation_codes(x: Array, cast: Cast, names: tuple[str, ...], params: ActivationParams) -> Quantized:
    """Codes of y [*rows, F], see `Quantized`, y rounded to x's dtype.

    On a GPU they are made where y is, which is never stored, unless one scale is to be made of its maximum.
    """
    how = How(names, params, cast.spec)
    return compute(
        TABLE, lambda platform: _request("forward", x, cast, how, platform), x, cast.multiplier, how=how
    )


def activation_backward_codes(
    dy: Array, x: Array, cast: Cast, names: tuple[str, ...], params: ActivationParams, sums: Any | None
) -> tuple[Quantized, Array | None]:
    """Codes of dx [*rows, n, F], see `Quantized`, and the sums of its columns [n, F] in dtype `sums`, if asked."""
    how = How(names, params, cast.spec, None if sums is None else sums_dtype(sums))
    codes, total = compute(
        TABLE, lambda platform: _request("backward", x, cast, how, platform), dy, x, cast.multiplier, how=how
    )
    return codes, None if total is None else total.astype(sums)


def _request(operation: str, x: Array, cast: Cast, how: How, platform: str) -> ActivationCodesRequest:
    width = x.shape[-1] * (len(how.names) if operation == "backward" else 1)
    made = Request(
        cast.spec, (prod(x.shape[:-2]), width), x.dtype, platform, cast.multiplier is not None, max(x.ndim - 2, 1)
    )  # fmt: skip
    activation = ActivationRequest(operation, how.names, x.dtype, x.size, platform)
    return ActivationCodesRequest(activation, made, x.shape[-1], how.sums is not None)

"""The column-sum request, and the reference in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..quantize import Cast, CastRequest, Quantized, QuantizeSpec, quantize_as
from ..quantize.fused_codes import cast_request


class ColumnSumsRequest(NamedTuple):
    """Column sums of a matrix [M, N]; result is the dtype of the sums.

    Attributes:
        shape: Matrix shape (M, N).
        strides: Matrix strides.
        dtype: Matrix dtype.
        result: Dtype of the sums.
        device: Matrix device.
        cast: How the matrix is quantized in the same operation, or None.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    result: torch.dtype
    device: torch.device
    cast: CastRequest | None = None


def make_request(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    result: torch.dtype,
    device: torch.device,
    spec: QuantizeSpec | None = None,
    has_multiplier: bool = False,
    records: bool = False,
) -> ColumnSumsRequest:
    """Return the request for a key; spec, has_multiplier and records describe the cast."""
    cast = cast_request(shape, dtype, device, spec, has_multiplier, records)
    return ColumnSumsRequest(shape, strides, dtype, result, device, cast)


def bind(request: ColumnSumsRequest) -> Callable[..., Any]:
    """Return x -> sums or, with a cast, (x, multiplier, record) -> (codes, sums)."""
    wide, dtype = torch.promote_types(request.dtype, torch.float32), request.result

    def sums(x: Tensor) -> Tensor:
        return x.sum(0, dtype=wide).to(dtype)

    return sums if request.cast is None else with_cast(request, sums)


def with_cast(
    request: ColumnSumsRequest, sums: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor | None, Tensor | None], tuple[Quantized, Tensor]]:
    """Return (x, multiplier, record) -> (codes of x, sums), computed in two steps."""
    assert request.cast is not None
    spec = request.cast.spec

    def both(
        x: Tensor, multiplier: Tensor | None, record: Tensor | None
    ) -> tuple[Quantized, Tensor]:
        return quantize_as(x, Cast(spec, multiplier, record)), sums(x)

    return both


BACKEND: Backend[ColumnSumsRequest] = Backend("reference", bind=bind)

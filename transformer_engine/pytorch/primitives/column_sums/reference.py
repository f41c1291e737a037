"""The sums of columns in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..quantize import Cast, CastRequest, Quantized, QuantizeSpec, quantize_as
from ..quantize.fused_codes import cast_request


class ColumnSumsRequest(NamedTuple):
    """One call on a matrix [M, N]; result is the dtype of the sums."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    result: torch.dtype
    device: torch.device
    cast: CastRequest | None = None


def request_of(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    result: torch.dtype,
    device: torch.device,
    spec: QuantizeSpec | None = None,
    given: bool = False,
    records: bool = False,
) -> ColumnSumsRequest:
    """The request that a call's key stands for; spec, given and records are those of its cast."""
    cast = cast_request(shape, dtype, device, spec, given, records)
    return ColumnSumsRequest(shape, strides, dtype, result, device, cast)


def bind(request: ColumnSumsRequest) -> Callable[..., Any]:
    """x -> its sums, or, for a cast, (x, multiplier, record) -> its codes and its sums."""
    wide, dtype = torch.promote_types(request.dtype, torch.float32), request.result

    def sums(x: Tensor) -> Tensor:
        return x.sum(0, dtype=wide).to(dtype)

    return sums if request.cast is None else beside_cast(request, sums)


def beside_cast(
    request: ColumnSumsRequest, sums: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor | None, Tensor | None], tuple[Quantized, Tensor]]:
    """(x, multiplier, record) -> the codes of x, and its sums: two steps."""
    assert request.cast is not None
    spec = request.cast.spec

    def both(x: Tensor, multiplier: Tensor | None, record: Tensor | None) -> tuple[Quantized, Tensor]:
        return quantize_as(x, Cast(spec, multiplier, record)), sums(x)

    return both


BACKEND: Backend[ColumnSumsRequest] = Backend("reference", bind=bind)

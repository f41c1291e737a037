"""The sums of columns in torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ..quantize import Cast, Quantized, quantize_as
from .request import ColumnSumsRequest


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

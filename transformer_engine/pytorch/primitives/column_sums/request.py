"""What a sum of columns is told before a backend says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..quantize import CastRequest, QuantizeSpec
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

"""maximum(x): max|x| over a matrix, for quantizers that take it over several ranks before they cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, Table
from ...runtime.launching import run, unsupported_casts
from .encodings import absolute_maximum


class MaximumRequest(NamedTuple):
    """A matrix: its element count, dtype and device, and whether it is contiguous.

    Attributes:
        size: Number of elements.
        dtype: Matrix dtype.
        device: Matrix device.
        contiguous: Whether the elements are contiguous.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    contiguous: bool


def _unsupported_reason(request: MaximumRequest) -> str | None:
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if not request.size:
        return "the matrix is empty"
    return None if request.contiguous else "it reads contiguous matrices"


def _bind(request: MaximumRequest) -> Callable[[Tensor], Tensor]:
    from ....common.kernels import cast

    launch = cast.absolute_maximum(request.size)
    return lambda x: run(launch, (x,))[0]


MAXIMUM: Table[MaximumRequest] = Table(
    "absolute_maximum",
    (
        Backend("triton", unsupported_reason=_unsupported_reason, bind=_bind),
        Backend("reference", bind=lambda request: absolute_maximum),
    ),
    describe=MaximumRequest,
)


def maximum(x: Tensor) -> Tensor:
    """Return max|x| as float32 [1]; 0 for an empty matrix, NaN if any element is NaN."""
    if torch.compiler.is_compiling():
        return absolute_maximum(x)
    return MAXIMUM.bound((x.numel(), x.dtype, x.device, x.is_contiguous()))(x)

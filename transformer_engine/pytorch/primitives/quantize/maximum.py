"""max|x| of a matrix, or of its Hadamard transform, for quantizers that reduce it over ranks before they cast."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend, Table
from ...runtime.launching import run, unsupported_casts
from .encodings import GROUP, absolute_maximum, hadamard_transform


class MaximumRequest(NamedTuple):
    """A tensor whose maximum is taken.

    Attributes:
        shape: Shape of the tensor; [M, K] if the maximum is that of a transform.
        dtype: Its dtype.
        device: Its device.
        contiguous: Whether it is contiguous.
        random_sign: Whether the Hadamard transform along M applies signs; None without a transform.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    random_sign: bool | None = None


def _unsupported_reason(request: MaximumRequest) -> str | None:
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if not prod(request.shape):
        return "the matrix is empty"
    if request.random_sign is not None and request.shape[0] % GROUP:
        return f"M={request.shape[0]} is not a multiple of {GROUP}, the group of the Hadamard transform"
    return None if request.contiguous else "it reads contiguous matrices"


def _bind(request: MaximumRequest) -> Callable[[Tensor], Tensor]:
    from ....common.kernels import cast, nvfp4  # they import triton

    if request.random_sign is None:
        launch = cast.absolute_maximum(prod(request.shape))
    else:
        rows, columns = request.shape
        launch = nvfp4.transformed_maximum((rows, columns), request.random_sign)
    return lambda x: run(launch, (x,))[0]


def _bind_reference(request: MaximumRequest) -> Callable[[Tensor], Tensor]:
    random_sign = request.random_sign
    if random_sign is None:
        return absolute_maximum
    return lambda x: absolute_maximum(hadamard_transform(x.t().contiguous(), random_sign))


MAXIMUM: Table[MaximumRequest] = Table(
    "absolute_maximum",
    (
        Backend("triton", unsupported_reason=_unsupported_reason, bind=_bind),
        Backend("reference", bind=_bind_reference),
    ),
    describe=MaximumRequest,
)


def maximum(x: Tensor) -> Tensor:
    """Return max|x| as float32 [1]; 0 for an empty matrix, NaN if any element is NaN."""
    if torch.compiler.is_compiling():
        return absolute_maximum(x)
    return MAXIMUM.bound((x.shape, x.dtype, x.device, x.is_contiguous()))(x)


def transformed_maximum(x: Tensor, random_sign: bool) -> Tensor:
    """max|Hadamard transform of x.T| of a matrix x [M, K], as float32 [1].

    Args:
        x: The matrix.
        random_sign: The transform applies signs.

    Raises:
        ValueError: M is not a multiple of the transform's groups of 16.
    """
    if torch.compiler.is_compiling():
        return absolute_maximum(hadamard_transform(x.t().contiguous(), random_sign))
    return MAXIMUM.bound((x.shape, x.dtype, x.device, x.is_contiguous(), random_sign))(x)

"""Activation-code request, and the backend that computes the values and their codes in two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..activation import (
    ActivationParams,
    ActivationRequest,
    activation_backward,
    activation_forward,
)
from ..quantize import Quantized, QuantizeRequest, QuantizeSpec, quantize
from ..several_axes import with_rows


@dataclass(frozen=True)
class CodedActivation:
    """An activation and the quantization of its result.

    Attributes:
        names: Activation names.
        params: Activation constants.
        spec: Code format.
        sums: dtype for the gradient's column sums, None without them.
    """

    names: tuple[str, ...]
    params: ActivationParams
    spec: QuantizeSpec
    sums: str | None = None


class ActivationCodesRequest(NamedTuple):
    """An operation on x [rows, n, width], and the quantization of its result.

    Attributes:
        activation: The operation.
        cast: The quantization.
        width: Width of x.
        sums: Whether a backward also computes the column sums of the gradient.
    """

    activation: ActivationRequest
    cast: QuantizeRequest
    width: int
    sums: bool = False


def forward(x: Array, multiplier: Array | None, coded: CodedActivation) -> Quantized:
    """See `activation_codes`."""
    y, axis = with_rows(activation_forward(x, coded.names, coded.params), 1)
    return quantize(y, coded.spec, multiplier=multiplier, axis=axis)


def backward(
    dy: Array, x: Array, multiplier: Array | None, coded: CodedActivation
) -> tuple[Quantized, Array | None]:
    """See `activation_backward_codes`."""
    dx, axis = with_rows(activation_backward(dy, x, coded.names, coded.params), 2)
    sums = None
    if coded.sums is not None:
        sums = dx.astype(jnp.float32).sum(axis=tuple(range(axis))).astype(coded.sums)
    return quantize(dx, coded.spec, multiplier=multiplier, axis=axis), sums


OPERATIONS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
BACKEND = Backend[ActivationCodesRequest](
    "separate", bind=lambda request: OPERATIONS[request.activation.operation]
)

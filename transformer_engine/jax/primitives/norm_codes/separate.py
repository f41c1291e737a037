"""Norm-code request, and the backend that computes the values and their codes in two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from ....common.dispatch import Backend
from ..norm import NormRequest, norm_forward
from ..quantize import Quantized, QuantizeRequest, QuantizeSpec, quantize
from ..several_axes import with_rows


@dataclass(frozen=True)
class CodedNorm:
    """A norm and the quantization of its result; see `norm_codes`.

    Attributes:
        centered: Whether the mean is subtracted (LayerNorm).
        zero_centered: Whether the norm multiplies by 1 + gamma instead of gamma.
        epsilon: Number added to the variance.
        spec: How the result is quantized.
    """

    centered: bool
    zero_centered: bool
    epsilon: float
    spec: QuantizeSpec


class NormCodesRequest(NamedTuple):
    """A norm over a matrix [rows, width], and its result's quantization.

    Attributes:
        norm: The norm.
        cast: The quantization.
        centered: Whether the norm is a layernorm; otherwise an rmsnorm.
    """

    norm: NormRequest
    cast: QuantizeRequest
    centered: bool


def run(
    x: Array, gamma: Array, beta: Array | None, multiplier: Array | None, coded: CodedNorm
) -> tuple[Quantized, Array | None, Array]:
    """See `norm_codes`."""
    y, mean, rstdev = norm_forward(
        x, gamma, beta, coded.centered, coded.zero_centered, coded.epsilon
    )
    y, axis = with_rows(y, 1)
    return quantize(y, coded.spec, multiplier=multiplier, axis=axis), mean, rstdev


BACKEND = Backend[NormCodesRequest]("separate", bind=lambda request: run)

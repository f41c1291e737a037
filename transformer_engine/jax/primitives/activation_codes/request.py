"""What the codes of an activation, or of its gradient, are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..activation import ActivationParams, ActivationRequest
from ..quantize import QuantizeSpec, Request


@dataclass(frozen=True)
class How:
    """The activation and the quantization of its result; sums: the dtype of those of the gradient's columns, if any."""

    names: tuple[str, ...]
    params: ActivationParams
    spec: QuantizeSpec
    sums: str | None = None


class ActivationCodesRequest(NamedTuple):
    """The operation on x [rows, n, width], and the quantization of the matrix that it answers.

    sums    backward: the sums of the gradient's columns too
    """

    activation: ActivationRequest
    cast: Request
    width: int
    sums: bool = False

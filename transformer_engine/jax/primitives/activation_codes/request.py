"""What the codes of an activation, or of its gradient, are asked for."""

from __future__ import annotations

from typing import NamedTuple

from ..activation import ActivationRequest
from ..quantize import Request


class ActivationCodesRequest(NamedTuple):
    """The operation on x [rows, n, width], and the quantization of the matrix that it answers.

    sums    backward: the sums of the gradient's columns too
    """

    activation: ActivationRequest
    cast: Request
    width: int
    sums: bool = False

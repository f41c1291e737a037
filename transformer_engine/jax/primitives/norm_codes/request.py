"""What the codes of a norm's output are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..norm import NormRequest
from ..quantize import QuantizeSpec, Request


@dataclass(frozen=True)
class How:
    """The norm, and the quantization of what it answers, as `norm_codes` takes them."""

    centered: bool
    zero_centered: bool
    epsilon: float
    spec: QuantizeSpec


class NormCodesRequest(NamedTuple):
    """The norm of a matrix [rows, width], and the quantization of what it answers."""

    norm: NormRequest
    cast: Request
    centered: bool

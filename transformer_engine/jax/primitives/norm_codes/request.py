"""What the codes of a norm's output are asked for."""

from __future__ import annotations

from typing import NamedTuple

from ..norm import NormRequest
from ..quantize import Request


class NormCodesRequest(NamedTuple):
    """The norm of a matrix [rows, width], and the quantization of what it answers."""

    norm: NormRequest
    cast: Request
    centered: bool

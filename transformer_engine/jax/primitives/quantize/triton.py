"""Quantization on NVIDIA GPUs by Triton kernels, bit-equal to the reference."""

from __future__ import annotations

from ....common.dispatch import Backend
from ...platform import compute_capability
from ..launching import refuses_on
from .format_row import PlannedCall
from .formats import FORMATS
from .spec import Request

_LIMIT = 1 << 24  # offsets inside a tile of 128 rows are 32-bit integers
_CAPABILITY = 90  # below, Triton rounds a cast to FP8 twice, or has none
_NAMES = ("QuantizePrimitive", "DBiasQuantizePrimitive")


def refuses(request: Request) -> str | None:
    for name in _NAMES:
        if (reason := refuses_on(request.platform, name)) is not None:
            return reason
    if (capability := compute_capability()) < _CAPABILITY:
        return f"compute capability {capability / 10} < 9.0: Triton rounds a cast to FP8 twice there, or has none"
    rows, depth = request.shape
    if not rows * depth:
        return "a matrix without elements"
    if rows >= _LIMIT or depth >= _LIMIT:
        return f"{rows} rows or {depth} columns reach {_LIMIT}"
    return None


def _bind(request: Request) -> PlannedCall:
    return FORMATS[request.spec.format.name].plan(request)


BACKEND: Backend[Request] = Backend("triton", refuses=refuses, bind=_bind)

"""Quantization on NVIDIA GPUs by Triton kernels, bit-equal to the reference."""

from __future__ import annotations

from ....common.dispatch import Backend
from ...runtime.launching import refuses_casts
from .format_row import PlannedCall
from .formats import FORMATS
from .spec import OPTIONS, Request

_LIMIT = 1 << 24  # offsets inside a tile of 128 rows are 32-bit integers


def refuses(request: Request) -> str | None:
    if (reason := refuses_casts(request.device, request.dtype)) is not None:
        return reason
    if 0 in request.shape:
        return "there is nothing to quantize"
    if max(request.shape) >= _LIMIT:
        return f"an extent of {list(request.shape)} reaches {_LIMIT}"
    if FORMATS[request.spec.format.name].plan is None:
        return f"there is no kernel for format {request.spec.format.name}"
    return None


def _bind(request: Request) -> PlannedCall:
    plan = FORMATS[request.spec.format.name].plan
    assert plan is not None, "refuses says so"
    return plan(request)


BACKEND: Backend[Request] = Backend(
    "triton", takes=frozenset(OPTIONS), refuses=refuses, bind=_bind, opaque=True
)

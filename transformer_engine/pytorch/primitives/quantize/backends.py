"""Backends of quantization and dequantization for every format.

The reference uses literal float32 operations; the Triton kernels produce the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.kernels.launch import LARGEST_EXTENT
from ...runtime.launching import unsupported_casts
from ..operand import Operand
from ..scale_order import row_major, swizzled
from .encodings import widen
from .format_row import PlannedCall, QuantizeInputs
from .formats import FORMATS
from .spec import OPTIONS, Quantized, QuantizeRequest, torch_dtype

__all__ = ["REFERENCE", "TRITON", "dequantize", "widen"]


def dequantize(operand: Operand) -> Tensor:
    """Return values [rows, K] = codes * scale, in float32 with one final rounding to operand.dtype."""
    form = operand.format
    if form is None:
        return operand.codes.to(operand.dtype)
    if operand.scale is None:
        raise ValueError(
            f"an operand of format {form.name} needs its scale, which is None; pass the one that `quantize` returned"
        )
    if form.in_tiles:
        return dequantize(row_major(operand))
    row = FORMATS.get(form.name)
    if row is None:
        raise ValueError(
            f"no rule to dequantize format {form.name!r}; choose one of {', '.join(FORMATS)}"
        )
    return row.dequantize(operand, operand.scale)


@functools.cache
def _allocates(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _unsupported_by_reference(request: QuantizeRequest) -> str | None:
    """Return the reason why torch cannot store the codes on a device other than a CPU or a CUDA device, or None."""
    if request.device.type in ("cpu", "cuda", "meta"):
        return None
    dtype = torch_dtype(request.spec.element)
    if _allocates(request.device, dtype):
        return None
    kind = request.device.type
    return f"torch has no {dtype} tensors on {kind}; move the module to the CPU, or use no recipe there"


def _bind_reference(request: QuantizeRequest) -> PlannedCall:
    spec, encode = request.spec, FORMATS[request.spec.format.name].quantize

    def call(x: Tensor, inputs: QuantizeInputs) -> Quantized:
        return encode(x, spec, inputs)

    def call_with_tiled_scales(x: Tensor, inputs: QuantizeInputs) -> Quantized:
        codes = encode(x, spec, inputs)
        in_tiles = [
            s if s is None else swizzled(s).view(s.dtype) for s in (codes.scale, codes.scale_t)
        ]
        return codes._replace(scale=in_tiles[0], scale_t=in_tiles[1])

    return call_with_tiled_scales if spec.tiled else call


def _unsupported_by_triton(request: QuantizeRequest) -> str | None:
    if (reason := unsupported_casts(request.device, request.dtype)) is not None:
        return reason
    if 0 in request.shape:
        return "there is nothing to quantize"
    if max(request.shape) >= LARGEST_EXTENT:
        return f"an extent of {list(request.shape)} reaches {LARGEST_EXTENT}"
    if FORMATS[request.spec.format.name].plan is None:
        return f"it has no kernel for format {request.spec.format.name}"
    return None


def _bind_triton(request: QuantizeRequest) -> PlannedCall:
    plan = FORMATS[request.spec.format.name].plan
    assert plan is not None, "_unsupported_by_triton checks it"
    return plan(request)


REFERENCE: Backend[QuantizeRequest] = Backend(
    "reference",
    takes=frozenset(OPTIONS),
    unsupported_reason=_unsupported_by_reference,
    bind=_bind_reference,
)
TRITON: Backend[QuantizeRequest] = Backend(
    "triton",
    takes=frozenset(OPTIONS),
    unsupported_reason=_unsupported_by_triton,
    bind=_bind_triton,
    opaque=True,
)

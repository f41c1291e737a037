"""A grouped product of MXFP8 codes in one launch, on GPUs whose tensor cores read the exponents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common import optional
from ....common.dispatch import Backend
from ....common.formats import EXPONENT_PRODUCTS, EXPONENTS
from ....common.kernels import launch
from ...runtime.device import current_hardware
from .groups import Matrices
from .request import GroupedGemmRequest, GroupedMatrices, GroupedProduct
from .triton import on_device

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device.type}"
    if (reason := launch.missing()) is not None:
        return reason
    if not (request.a_format == request.b_format == EXPONENTS):
        return f"it takes two {EXPONENTS.name} operands"
    hardware = current_hardware()
    if (reason := hardware.lacks(EXPONENT_PRODUCTS)) is not None:
        return reason
    if optional.release("triton") < hardware.scaled_dot:
        least = ".".join(map(str, hardware.scaled_dot))
        return (
            f"tl.dot_scaled multiplies in bfloat16 on {hardware.title} before Triton {least}; upgrade triton"
        )
    if request.clears:
        return "rows of no group are cleared, which its products leave undefined"
    if max(request.n, request.k, request.rows) >= launch.LARGEST_EXTENT:
        return f"N={request.n}, K={request.k} or the {request.rows} rows reach {launch.LARGEST_EXTENT}"
    if request.result not in _RESULTS:
        return f"the result is {request.result}; it writes bfloat16, float16 and float32"
    return None


def bind(request: GroupedGemmRequest) -> Callable[[GroupedProduct], None]:
    from ....common.kernels import grouped_scaled as kernels  # it imports triton

    elements = _ELEMENTS[request.a_element], _ELEMENTS[request.b_element]
    shape = request.rows, request.n, request.k, request.groups, elements
    if request.along == "columns":
        record, start = kernels.product_of_rows(*shape), _rows
    else:
        options = {"accumulates": request.accumulates, "by_address": request.by_address}
        record, start = kernels.product_of_columns(*shape, **options), _columns
    return on_device(start, record)


def _rows(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b = product.a, product.b
    assert isinstance(b, GroupedMatrices) and isinstance(product.out, Tensor)
    inputs = (a.codes, b.codes, product.groups.layout, a.scale, b.scale, product.bias)
    launch.start(record, (*inputs, product.out), device)


def _columns(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b, out = product.a, product.b, product.out
    table = None if isinstance(out, Tensor) else Matrices.of(out).table
    first = out if isinstance(out, Tensor) else out[0]
    inputs = (a.codes, b.codes, a.scale, b.scale, product.groups.layout, table)
    launch.start(record, (*inputs, first), device)


BACKEND: Backend[GroupedGemmRequest] = Backend(
    "triton_scaled", unsupported_reason=unsupported_reason, bind=bind
)

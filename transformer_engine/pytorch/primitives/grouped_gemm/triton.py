"""A grouped product in one Triton launch, whatever the group sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....common.dispatch import BY_TILE, Backend, always_depends
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ....common.kernels import launch
from ...runtime.device import current_hardware, is_current_device
from ...runtime.launching import DTYPE_NAMES, processors
from .groups import Matrices
from .request import GroupedGemmRequest, GroupedMatrices, GroupedProduct

_HALVES = (torch.bfloat16, torch.float16)


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device.type}"
    if (reason := launch.unavailable_reason(current_hardware())) is not None:
        return reason
    if torch.version.hip is not None:
        return "its tiles are for NVIDIA's tensor cores, this torch is built for ROCm"
    formats = (request.a_format, request.b_format)
    if formats == (None, None):
        if request.a_element not in _HALVES or request.a_element != request.b_element:
            return f"it takes two bfloat16 or float16 operands, not {request.a_element} and {request.b_element}"
    elif formats != (FLOAT8, FLOAT8) and formats not in (
        (BLOCK_1D, BLOCK_2D),
        (BLOCK_1D, BLOCK_1D),
    ):
        return "it takes one scale per tensor, or 1x128 blocks times 128x128 or 1x128 blocks"
    if (
        reason := current_hardware().lacks(
            "bf16 products" if formats == (None, None) else "fp8 products"
        )
    ) is not None:
        return reason
    return unsupported_result(request)


def unsupported_result(request: GroupedGemmRequest) -> str | None:
    """Reason why kernels with one scale per group or 1x128 blocks do not write a result, or None."""
    if request.n % 16 or request.k % 16:
        return f"N={request.n} or K={request.k} is not a multiple of 16"
    if max(request.n, request.k) >= launch.LARGEST_EXTENT:
        return f"N={request.n} or K={request.k} reaches {launch.LARGEST_EXTENT}"
    if request.result not in DTYPE_NAMES:
        return f"the result is {request.result}; it writes bfloat16, float16 and float32"
    return None


def bind(request: GroupedGemmRequest) -> Callable[[GroupedProduct], None]:
    from ....common.kernels import grouped_gemm as kernels  # it imports triton

    scaling = kernels.UNSCALED
    if request.a_format is not None:
        scaling = kernels.TENSOR_SCALES if request.a_format == FLOAT8 else kernels.BLOCK_SCALES
    options = {
        "scaling": scaling,
        "exact": request.exact and request.a_format == FLOAT8,
        "by_address": request.by_address,
        "shared_memory": processors(request.device.index).shared_memory,
        "hopper": current_hardware().has("hopper instructions"),
    }
    n, k, groups = request.n, request.k, request.groups
    if request.along == "columns":
        record = kernels.product_of_rows(
            request.rows,
            n,
            k,
            groups,
            transposed=request.transposed,
            clears=request.clears,
            **options,
        )
    else:
        options |= {"accumulates": request.accumulates, "tiled": request.tiled}
        record = kernels.product_of_columns(n, k, groups, **options)
    return run_on_device(_rows if request.along == "columns" else _columns, record)


def run_on_device(
    start: Callable[[launch.Launch, GroupedProduct, int], None], record: launch.Launch
) -> Callable[[GroupedProduct], None]:
    """Return the call that starts a launch on its operands' device."""

    def call(product: GroupedProduct) -> None:
        device = product.a.codes.get_device()
        if is_current_device(device):
            start(record, product, device)
            return
        with torch.cuda.device(device):
            start(record, product, device)

    return call


def _rows(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b, groups = product.a, product.b, product.groups
    assert isinstance(b, GroupedMatrices) and isinstance(product.out, Tensor)
    matrix, table = (
        (b.codes, None) if b.matrices is None else (b.matrices.tensors[0], b.matrices.table)
    )
    inputs = (a.codes, matrix, table, a.scale, b.scale, product.bias, groups.layout)
    launch.start(record, (*inputs, product.out), device)


def _columns(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b, groups, out = product.a, product.b, product.groups, product.out
    table = None if isinstance(out, Tensor) else Matrices.of(out).table
    first = out if isinstance(out, Tensor) else out[0]
    launch.start(record, (a.codes, b.codes, a.scale, b.scale, groups.layout, table, first), device)


BACKEND: Backend[GroupedGemmRequest] = Backend(
    "triton",
    unsupported_reason=unsupported_reason,
    bind=bind,
    batch_dependent=always_depends(BY_TILE),
)

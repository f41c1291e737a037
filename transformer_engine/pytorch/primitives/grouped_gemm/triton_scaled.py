"""A grouped MXFP8 or NVFP4 product in one launch, on GPUs whose tensor cores read the block scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....common import optional
from ....common.dispatch import BY_TILE, Backend, always_depends
from ....common.formats import SWIZZLED_NAMES
from ....common.kernels import launch
from ...runtime.device import current_hardware
from .groups import Matrices
from .request import GroupedColumns, GroupedGemmRequest, GroupedMatrices, GroupedProduct
from .triton import run_on_device

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device.type}"
    if (reason := launch.unavailable_reason(current_hardware())) is not None:
        return reason
    a, b = request.a_format, request.b_format
    if (
        a is None
        or b is None
        or not (a.swizzled and b.swizzled)
        or a.block_products != b.block_products
        or b.row_scaled
    ):
        return f"it takes two operands of {SWIZZLED_NAMES}, the right one without scales per row"
    assert a.block_products is not None
    hardware = current_hardware()
    if (reason := hardware.lacks(a.block_products)) is not None:
        return reason
    if (reason := optional.scaled_dot_problem(hardware, optional.release("triton"))) is not None:
        return reason
    if request.clears:
        return "rows of no group are cleared, which its products leave undefined"
    if max(request.n, request.k, request.rows) >= launch.LARGEST_EXTENT:
        return (
            f"N={request.n}, K={request.k} or the {request.rows} rows reach {launch.LARGEST_EXTENT}"
        )
    if request.result not in _RESULTS:
        return f"the result is {request.result}; it writes bfloat16, float16 and float32"
    return None


def bind(request: GroupedGemmRequest) -> Callable[[GroupedProduct], None]:
    from ....common.kernels import grouped_scaled as kernels  # it imports triton

    a, b = request.a_format, request.b_format
    assert a is not None and b is not None
    factor = (
        None if a.unit_amax is None or b.unit_amax is None else 1.0 / (a.unit_amax * b.unit_amax)
    )
    elements = _ELEMENTS[request.a_element], _ELEMENTS[request.b_element]
    scales = kernels.BlockScales(elements, a.length, factor, a.row_scaled)
    shape = request.rows, request.n, request.k, request.groups, scales
    if request.along == "columns":
        make, start = partial(kernels.product_of_rows, *shape), _rows
    else:
        options = {"accumulates": request.accumulates, "by_address": request.by_address}
        make, start = partial(kernels.product_of_columns, *shape, **options), _columns
    record = make()
    if not current_hardware().has("tensor memory"):
        return run_on_device(start, record)
    by_tma = make(tma=True)

    def start_aligned(record: launch.Launch, product: GroupedProduct, device: int) -> None:
        start(by_tma if _is_aligned(product) else record, product, device)

    return run_on_device(start_aligned, record)


def _is_aligned(product: GroupedProduct) -> bool:
    """Return whether TMA can load the codes: they are not empty, and addresses and rows are divisible by 16 bytes."""
    for codes in (product.a.codes, product.b.codes):
        if codes is None or not codes.numel():
            return False
        if (codes.data_ptr() | codes.shape[-1] * codes.element_size()) % launch.ALIGNMENT:
            return False
    return True


def _rows(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b = product.a, product.b
    assert isinstance(b, GroupedMatrices) and isinstance(product.out, Tensor)
    inputs = (
        a.codes,
        b.codes,
        product.groups.layout,
        a.scale,
        b.scale,
        a.amax,
        b.amax,
        product.bias,
    )
    launch.start(record, (*inputs, product.out), device)


def _columns(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b, out = product.a, product.b, product.out
    assert isinstance(a, GroupedColumns) and isinstance(b, GroupedColumns)
    table = None if isinstance(out, Tensor) else Matrices.of(out).table
    first = out if isinstance(out, Tensor) else out[0]
    inputs = (a.codes, b.codes, a.scale, b.scale, a.amax, b.amax, product.groups.layout, table)
    launch.start(record, (*inputs, first), device)


BACKEND: Backend[GroupedGemmRequest] = Backend(
    "triton_scaled",
    unsupported_reason=unsupported_reason,
    bind=bind,
    batch_dependent=always_depends(BY_TILE),
)

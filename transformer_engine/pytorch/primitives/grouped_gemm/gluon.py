"""A grouped product of FP8 codes, scaled per group or per 128 elements, in one launch of a Gluon kernel for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import BY_TILE, Backend, always_depends
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, ceil_div
from ....common.kernels import launch
from ...runtime.device import current_hardware
from ...runtime.launching import DTYPE_NAMES, processors
from ...runtime.tracing import constant_while_tracing
from . import triton
from .groups import TILE_ROWS, Matrices
from .request import GroupedGemmRequest, GroupedProduct

_LARGEST_AXIS = 1 << 31  # the copy engine's coordinates have 32 bits


@constant_while_tracing
def unavailable_reason() -> str | None:
    """Return the reason why kernels in Gluon for Hopper do not run on the current GPU, or None."""
    return launch.gluon_missing(current_hardware())


def unsupported_reason(request: GroupedGemmRequest) -> str | None:
    if request.device.type != "cuda":
        return f"it needs a CUDA device, the operands are on {request.device.type}"
    if (reason := unavailable_reason()) is not None:
        return reason
    weights = BLOCK_2D if request.along == "columns" else BLOCK_1D
    if (request.a_format, request.b_format) not in ((FLOAT8, FLOAT8), (BLOCK_1D, weights)):
        return (
            "it takes one scale per group, or 1x128 blocks times 128x128 blocks (of columns: 1x128)"
        )
    if (reason := triton.unsupported_result(request)) is not None:
        return reason
    if request.by_address and request.along == "columns":
        return "it reads one stack of codes, not one tensor per group"
    if request.clears:
        return "rows of no group are cleared, which its products leave undefined"
    if request.along == "rows" and not request.tiled:
        return "the codes of columns are contiguous per group; it reads tiles of 128 rows"
    if request.accumulates and request.result != torch.float32:
        return f"it adds to float32, not to {request.result}"
    return None


def bind(request: GroupedGemmRequest) -> Callable[[GroupedProduct], None]:
    # They import triton.
    from ....common.kernels import grouped_block_product, grouped_product

    if (
        request.a_format == BLOCK_1D
        and request.rows * ceil_div(request.k, TILE_ROWS) >= _LARGEST_AXIS
    ):
        return triton.bind(request)
    n, k, groups, dtype = request.n, request.k, request.groups, DTYPE_NAMES[request.result]
    options: dict[str, Any] = {"processors": processors(request.device.index).count}
    kernels: Any = grouped_block_product
    if request.a_format == FLOAT8:
        kernels, options["exact"] = grouped_product, request.exact
    if request.along == "columns":
        record = kernels.product_of_rows(request.rows, n, k, groups, dtype, **options)
    else:
        options |= {"accumulates": request.accumulates, "by_address": request.by_address}
        record = kernels.product_of_columns(n, k, groups, dtype, **options)
    call = triton.run_on_device(_start, record)
    # Views can begin at any element, which tensor maps cannot.
    unaligned = functools.cache(functools.partial(triton.bind, request))
    return lambda product: call(product) if _aligned(product) else unaligned()(product)


def _aligned(product: GroupedProduct) -> bool:
    a, b, out = product.a.codes, product.b.codes, product.out
    assert b is not None
    # One tensor per group is written through pointers, and `irregular` has checked the alignment.
    address = out.data_ptr() if isinstance(out, Tensor) else 0
    return (a.data_ptr() | b.data_ptr() | address) % launch.ALIGNMENT == 0


def _start(record: launch.Launch, product: GroupedProduct, device: int) -> None:
    a, b, layout, out = product.a, product.b, product.groups.layout, product.out
    table = None if isinstance(out, Tensor) else Matrices.of(out).table
    first = out if isinstance(out, Tensor) else out[0]
    launch.start(
        record, (a.codes, b.codes, a.scale, b.scale, product.bias, layout, table, first), device
    )


BACKEND: Backend[GroupedGemmRequest] = Backend(
    "gluon",
    unsupported_reason=unsupported_reason,
    bind=bind,
    batch_dependent=always_depends(BY_TILE),
)

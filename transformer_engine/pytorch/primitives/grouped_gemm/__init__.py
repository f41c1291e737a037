"""y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T and dw_e [N, K] = dy_e.T @ x_e, for all row groups at once.

torch.nn.functional.grouped_mm requires stacked parameters; these Triton kernels read the parameters
in place. On an H200 both take about the same time (64 groups of 512 x 1408 x 2048, bfloat16: 628,
649 and 499 TFLOP/s of torch for the three products, 641, 605 and 496 of these kernels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....common.dispatch import Table
from ....common.formats import BLOCK_1D, FLOAT8, TensorFormat
from . import gluon, library, reference, triton, triton_scaled
from .groups import Groups, Matrices, cached_on_device, irregular, make_groups
from .request import (
    GroupedColumns,
    GroupedGemmRequest,
    GroupedMatrices,
    GroupedOperand,
    GroupedProduct,
    GroupedRows,
    make_request,
)

__all__ = [
    "TABLE",
    "GroupedColumns",
    "GroupedGemmRequest",
    "GroupedMatrices",
    "GroupedOperand",
    "GroupedRows",
    "Groups",
    "Matrices",
    "cached_on_device",
    "irregular",
    "make_groups",
    "product_of_columns",
    "product_of_rows",
    "tiles_columns",
]

TABLE: Table[GroupedGemmRequest] = Table(
    "grouped_gemm",
    (library.BACKEND, gluon.BACKEND, triton.BACKEND, triton_scaled.BACKEND, reference.BACKEND),
    describe=GroupedGemmRequest,
)


def tiles_columns(tensor_format: TensorFormat, count: int, device: torch.device) -> bool:
    """Return whether column codes of `count` groups are tiles of 128 rows, which the fastest product reads.

    Few groups have contiguous codes, which the library's products read.
    """
    if tensor_format not in (FLOAT8, BLOCK_1D) or count <= library.FEW or device.type != "cuda":
        return False
    return gluon.unavailable_reason() is None


def product_of_rows(
    a: GroupedRows,
    b: GroupedMatrices,
    groups: Groups,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
    clears: bool = False,
) -> Tensor:
    """Compute y_e [M_e, N] = a_e [M_e, K] @ b_e [N, K].T + bias[e] for every group.

    Args:
        a: Rows [total, K] of all groups.
        b: Matrix [N, K] per group.
        groups: Rows per group.
        dtype: Dtype of y.
        bias: Biases [groups, N]; None to add none.
        exact: Promote partial sums of FP8 products to float32.
        out: Contiguous buffer with y's shape and dtype, which receives y; None to allocate y.
        clears: Rows behind the last group are zero; otherwise they are undefined.

    Returns:
        y [total, N].

    Raises:
        ValueError: The contracted extents differ.
    """
    n, k = b.extents
    codes = a.codes
    depth = codes.shape[1] if a.format is None else codes.shape[1] * a.format.packing
    if depth != k:
        raise ValueError(f"the rows contract {depth} elements, the matrices {k}; both need one K")
    if out is None:
        out = torch.empty((groups.total, n), dtype=dtype, device=codes.device)
    if groups.total == 0:
        return out
    product = GroupedProduct(a, b, groups, (n, k), out, bias, False, exact, clears)
    TABLE.bound_in_eager_mode(make_request(product))(product)
    return out


def product_of_columns(
    a: GroupedColumns,
    b: GroupedColumns,
    groups: Groups,
    extents: tuple[int, int],
    out: Tensor | Sequence[Tensor],
    *,
    accumulate: bool = False,
    exact: bool = True,
) -> None:
    """Compute out[e] [N, K] = a_e.T @ b_e for every group e.

    Args:
        a: Columns of a [total, N].
        b: Columns of b [total, K].
        groups: Rows per group.
        extents: (N, K).
        out: A stack [groups, N, K], or one tensor per group.
        accumulate: Add to out.
        exact: Promote partial sums of FP8 products to float32.
    """
    if groups.total == 0:
        for result in () if accumulate else out:
            result.zero_()
        return
    product = GroupedProduct(a, b, groups, extents, out, None, accumulate, exact)
    TABLE.bound_in_eager_mode(make_request(product))(product)

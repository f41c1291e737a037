"""The operands of a grouped product, for all groups at once, and the request that backends support or reject."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from .groups import Groups, Matrices

# (saved tensors, possibly followed by others) -> (operand, its tensor count)
Rebuilt = Callable[[list[Any]], tuple[Any, int]]


class GroupedRows(NamedTuple):
    """The rows of all groups [total, K], contracted along K.

    Attributes:
        codes: [total, K] contiguous: FP8, or high precision if format is None. NVFP4: packed, [total, K / 2].
        scale: FLOAT8: float32 [groups, 4], whose first column alone is read, so that scales are 16
            bytes apart. BLOCK_1D: float32, group after group [ceil(K / 128), rows], flattened.
            MXFP8: exponents [total, K / 32]. NVFP4: float8_e4m3fn [total, K / 16].
        format: Code format, or None.
        amax: NVFP4 only: float32 [groups], or [total] with one second-level scale per row.
    """

    codes: Tensor
    scale: Tensor | None = None
    format: TensorFormat | None = None
    amax: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that a backward pass saves."""
        return [self.codes, self.scale, self.amax]

    def split_tensors(self) -> tuple[list[Tensor | None], Rebuilt]:
        """Return these tensors, and the function that reconstructs the operand from them."""
        return self.tensors(), functools.partial(_rebuilt, GroupedRows, self.format)


class GroupedColumns(NamedTuple):
    """Rows of all groups, contracted per group.

    Attributes:
        codes: High precision [total, K] if format is None. MXFP8 and NVFP4: the transpose [K, total], packed
            for NVFP4, for groups whose rows are a multiple of 32. Otherwise the transpose of every group,
            group after group [K, rows rounded up to 128] with zeros at the end, flattened; or tiles
            [tiles, K, 128] with 128 rows of one group each (`tiles_columns`).
        scale: FLOAT8: float32 [groups, 4]. BLOCK_1D: float32, group after group [ceil(rows / 128), K], flattened.
            MXFP8: exponents [K, total / 32]. NVFP4: float8_e4m3fn [K, total / 16].
        format: Code format, or None.
        amax: NVFP4 only: float32 [groups].
    """

    codes: Tensor
    scale: Tensor | None = None
    format: TensorFormat | None = None
    amax: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that a backward pass saves."""
        return [self.codes, self.scale, self.amax]

    def split_tensors(self) -> tuple[list[Tensor | None], Rebuilt]:
        """Return these tensors, and the function that reconstructs the operand from them."""
        return self.tensors(), functools.partial(_rebuilt, GroupedColumns, self.format)


class GroupedMatrices(NamedTuple):
    """One matrix per group, b_e [N, K], contracted along K.

    Attributes:
        matrices: High-precision matrices, not copied.
        transposed: Whether the matrices are [K, N].
        codes: FP8 [groups, N, K], instead of matrices. NVFP4: packed, [groups, N, K / 2].
        scale: FLOAT8: float32 [groups, 4]. BLOCK_2D: float32 [groups, ceil(N / 128), ceil(K / 128)]. MXFP8: exponents
            [groups, N, K / 32]. NVFP4: float8_e4m3fn [groups, N, K / 16].
        format: Code format, or None.
        amax: NVFP4 only: float32 [groups].
    """

    matrices: Matrices | None = None
    transposed: bool = False
    codes: Tensor | None = None
    scale: Tensor | None = None
    format: TensorFormat | None = None
    amax: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that a backward pass saves; only codes are saved in this form."""
        return [self.codes, self.scale, self.amax]

    def split_tensors(self) -> tuple[list[Tensor | None], Rebuilt]:
        """Return these tensors, and the function that reconstructs the operand from them."""
        return self.tensors(), functools.partial(_rebuilt, _coded_operand, self.format)

    @property
    def extents(self) -> tuple[int, int]:
        """Return (N, K) of a matrix."""
        if self.codes is not None:
            _, rows, columns = self.codes.shape
            return rows, columns if self.format is None else columns * self.format.packing
        assert self.matrices is not None
        rows, columns = self.matrices.tensors[0].shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def element(self) -> torch.dtype:
        if self.codes is not None:
            return self.codes.dtype
        assert self.matrices is not None
        return self.matrices.tensors[0].dtype


def is_tiled(operand: GroupedRows | GroupedColumns) -> bool:
    """Return whether the codes of columns are tiles [tiles, K, 128]."""
    return operand.codes.dim() == 3


GroupedOperand = GroupedRows | GroupedColumns | GroupedMatrices


def _coded_operand(
    codes: Tensor, scale: Tensor, tensor_format: TensorFormat, amax: Tensor | None
) -> GroupedMatrices:
    return GroupedMatrices(codes=codes, scale=scale, format=tensor_format, amax=amax)


def _rebuilt(
    make: Callable[..., Any], tensor_format: TensorFormat | None, tensors: list[Any]
) -> tuple[Any, int]:
    codes, scale, amax = tensors[:3]
    return make(codes, scale, tensor_format, amax), 3


class GroupedProduct(NamedTuple):
    """One call: a product of rows if b holds matrices, or a product of columns if b holds columns.

    Attributes:
        a: Left operand.
        b: Right operand.
        groups: Rows per group.
        extents: (N, K) of b_e or the result.
        out: [total, N]; in a product of columns, a stack [groups, N, K] or one tensor per group.
        bias: Biases [groups, N], in a product of rows only.
        accumulate: Add to out.
        exact: Promote partial sums of FP8 products to float32.
        clears: In a product of rows, set rows of out after the last group to zero.
    """

    a: GroupedRows | GroupedColumns
    b: GroupedMatrices | GroupedColumns
    groups: Groups
    extents: tuple[int, int]
    out: Tensor | Sequence[Tensor]
    bias: Tensor | None = None
    accumulate: bool = False
    exact: bool = True
    clears: bool = False


class GroupedGemmRequest(NamedTuple):
    """The properties by which a backend is chosen; they do not depend on values.

    Attributes:
        along: "columns": y_e = a_e @ b_e.T; "rows": dw_e = a_e.T @ b_e.
        fits: FP8 only: whether every group's row count is a multiple of 16.
        n: N of b_e or the result.
        k: K of b_e or the result.
        transposed: Whether b holds matrices [K, N].
        by_address: Whether one tensor per group is read or, along the rows, written in place.
        tiled: Whether the codes of columns are tiles of 128 rows.
    """

    along: str
    a_format: TensorFormat | None
    b_format: TensorFormat | None
    a_element: torch.dtype
    b_element: torch.dtype
    result: torch.dtype
    groups: int
    rows: int
    rows_known: bool
    fits: bool
    n: int
    k: int
    device: torch.device
    exact: bool
    transposed: bool
    by_address: bool
    accumulates: bool
    clears: bool = False
    tiled: bool = False


def make_request(product: GroupedProduct) -> GroupedGemmRequest:
    """Return the request for one call."""
    a, b, groups, (n, k), out, _, accumulate, exact, clears = product
    rows = groups.rows
    if isinstance(b, GroupedMatrices):
        along, element, transposed = "columns", b.element, b.transposed
        by_address = b.matrices is not None and b.matrices.table is not None
    else:
        along, element, transposed = "rows", b.codes.dtype, False
        assert is_tiled(a) == is_tiled(b), "the codes of both operands are tiles, or neither's are"
        by_address = not isinstance(out, Tensor)
    return GroupedGemmRequest(
        along,
        a.format,
        b.format,
        a.codes.dtype,
        element,
        out.dtype if isinstance(out, Tensor) else out[0].dtype,
        groups.count,
        groups.total,
        rows is not None,
        rows is not None and (a.format is None or groups.fits),
        n,
        k,
        a.codes.device,
        exact,
        transposed,
        by_address,
        accumulate,
        clears,
        along == "rows" and is_tiled(a),
    )

"""codes, scales of every group = quantize(its rows, spec), bit for bit, for all groups at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Table
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ....common.kernels import launch
from ...runtime.device import current_hardware
from ...runtime.launching import run
from ..grouped_gemm import Groups, Matrices
from ..quantize import QuantizeSpec, quantize
from . import reference, triton
from .separate import quantize_matrices_separately, quantize_rows_separately
from .spec import GroupedQuantized, GroupedQuantizeRequest, ScaleSlots

__all__ = [
    "TABLE",
    "GroupedQuantizeRequest",
    "GroupedQuantized",
    "ScaleSlots",
    "quantize_matrices",
    "quantize_matrices_separately",
    "quantize_rows",
    "quantize_rows_separately",
    "row_sums",
]

TABLE: Table[GroupedQuantizeRequest] = Table(
    "grouped_quantize", (triton.BACKEND, reference.BACKEND), describe=GroupedQuantizeRequest
)


def quantize_rows(
    x: Tensor,
    groups: Groups,
    spec: QuantizeSpec,
    slots: ScaleSlots | None = None,
    *,
    tiled: bool = False,
) -> GroupedQuantized:
    """Quantize each row group of x [total, K]: FLOAT8 by its slot's scale or its own amax, blocks or MXFP8.

    Args:
        x: The rows.
        groups: The rows of each group.
        spec: Target format and scaling.
        slots: Given scales; None to compute them.
        tiled: Store codes of columns as tiles [tiles, K, 128] of 128 rows.

    Raises:
        ValueError: The format is unsupported, or a group's rows are not a multiple of 32 in MXFP8 columns.
    """
    if spec.format.has_exponent_scales:
        return _rows_of_one_matrix(x, groups, spec)
    if spec.format not in (FLOAT8, BLOCK_1D):
        raise ValueError(
            f"groups of rows are quantized to float8, block1d or exponents, not to {spec.format.name}"
        )
    shape = (x.shape[0], x.shape[1])
    key = (
        spec,
        False,
        groups.count,
        shape,
        x.dtype,
        x.device,
        None if slots is None else (slots.stride, slots.offset),
        tiled,
    )
    return TABLE.bound(key)(x, groups, slots)


def _rows_of_one_matrix(x: Tensor, groups: Groups, spec: QuantizeSpec) -> GroupedQuantized:
    """Quantize all rows as one matrix: no 32-row block contains rows from two groups."""
    multiple = spec.format.length
    if spec.columnwise and (groups.rows is None or any(rows % multiple for rows in groups.rows)):
        rows = "unknown on the host" if groups.rows is None else list(groups.rows)
        raise ValueError(
            f"the groups' rows are {rows}; {spec.format.name} columns need known multiples of {multiple}"
        )
    return GroupedQuantized(*quantize(x, spec)[:4])


def quantize_matrices(
    matrices: Matrices, spec: QuantizeSpec, slots: ScaleSlots | None = None
) -> GroupedQuantized:
    """Quantize each matrix [M, K]: FLOAT8 by its slot's scale or its own amax, in 128x128 blocks, or to MXFP8.

    Raises:
        ValueError: The format is unsupported.
    """
    if spec.format not in (FLOAT8, BLOCK_2D) and not spec.format.has_exponent_scales:
        raise ValueError(
            f"matrices are quantized to float8, block2d or exponents, not to {spec.format.name}"
        )
    first = matrices.tensors[0]
    key = (
        spec,
        True,
        len(matrices.tensors),
        matrices.shape,
        first.dtype,
        first.device,
        None if slots is None else (slots.stride, slots.offset),
    )
    return TABLE.bound(key)(matrices, None, slots)


def row_sums(x: Tensor, groups: Groups) -> Tensor:
    """Sum each group's rows of x [total, N], float32 [groups, N]: bias gradients.

    The host waits for nothing on a GPU with Triton.
    """
    if not x.is_cuda or launch.unavailable_reason(current_hardware()) is not None:
        return torch.stack([part.sum(0, dtype=torch.float32) for part in groups.split(x)])
    from ....common.kernels import grouped_gemm

    return run(grouped_gemm.row_sums(x.shape[1], groups.count), (x, groups.layout))[0]

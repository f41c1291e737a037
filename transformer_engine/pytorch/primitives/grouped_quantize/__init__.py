"""codes, scales of every group = quantize(its rows, spec), bit for bit, for all groups at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Table
from ....common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from ....common.kernels import launch
from ...runtime.launching import run
from ..grouped_gemm import Groups, Matrices
from ..quantize import QuantizeSpec
from . import reference, triton
from .spec import GroupedQuantized, GroupedQuantizeRequest, ScaleSlots

__all__ = [
    "TABLE",
    "GroupedQuantizeRequest",
    "GroupedQuantized",
    "ScaleSlots",
    "quantize_matrices",
    "quantize_rows",
    "row_sums",
]

TABLE: Table[GroupedQuantizeRequest] = Table(
    "grouped_quantize", (triton.BACKEND, reference.BACKEND), describe=GroupedQuantizeRequest
)


def quantize_rows(
    x: Tensor, groups: Groups, spec: QuantizeSpec, slots: ScaleSlots | None = None
) -> GroupedQuantized:
    """Quantize each group of rows of x [total, K]: FLOAT8 by the scales of slots or its own amax, or in 1x128 blocks.

    Raises:
        ValueError: The format is unsupported.
    """
    if spec.format not in (FLOAT8, BLOCK_1D):
        raise ValueError(f"groups of rows are quantized to float8 or block1d, not to {spec.format.name}")
    shape = (x.shape[0], x.shape[1])
    key = (
        spec,
        False,
        groups.count,
        shape,
        x.dtype,
        x.device,
        None if slots is None else (slots.stride, slots.offset),
    )
    return TABLE.bound(key)(x, groups, slots)


def quantize_matrices(
    matrices: Matrices, spec: QuantizeSpec, slots: ScaleSlots | None = None
) -> GroupedQuantized:
    """Quantize each matrix [M, K]: FLOAT8 by the scales of slots or its own amax, or in 128x128 blocks.

    Raises:
        ValueError: The format is unsupported.
    """
    if spec.format not in (FLOAT8, BLOCK_2D):
        raise ValueError(f"matrices are quantized to float8 or block2d, not to {spec.format.name}")
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
    """Return the sum of the rows of each group of x [total, N], float32 [groups, N]: gradients of biases.

    The host waits for nothing on a GPU with Triton.
    """
    if not x.is_cuda or launch.missing() is not None:
        return torch.stack([part.sum(0, dtype=torch.float32) for part in groups.split(x)])
    from ....common.kernels import grouped_gemm

    return run(grouped_gemm.row_sums(x.shape[1], groups.count), (x, groups.layout))[0]

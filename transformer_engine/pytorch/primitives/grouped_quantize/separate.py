"""NVFP4 groups for one product in one launch: each group is quantized with its own second-level scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..grouped_gemm import Groups, Matrices
from ..quantize import Quantized, QuantizeSpec
from .spec import GroupedQuantized

# Quantizes one group's matrix.
QuantizeOne = Callable[[Tensor, QuantizeSpec], Quantized]


def quantize_rows_separately(
    x: Tensor, groups: Groups, spec: QuantizeSpec, quantize_one: QuantizeOne
) -> GroupedQuantized:
    """Quantize each row group of x [total, K] by `quantize_one`, in `GroupedRows` and `GroupedColumns` layouts.

    Random numbers are drawn in group order.

    Raises:
        ValueError: The host does not know the groups' rows.
    """
    if groups.rows is None:
        raise ValueError(
            "the groups' rows are unknown on the host; pass them as a list to quantize each group"
        )
    parts = [quantize_one(part, spec) if len(part) else None for part in groups.split(x)]
    present = [part for part in parts if part is not None]
    codes, scale, codes_t, scale_t, amax, amax_t = [
        None if first is None else [member for part in present if (member := part[i]) is not None]
        for i, first in enumerate(present[0])
    ]
    if amax is not None and spec.format.row_scaled:
        amaxes = torch.cat(amax)
    else:
        amaxes = _merge_maxima([None if part is None else part.amax for part in parts], amax)
    return GroupedQuantized(
        _join_parts(codes, 0),
        _join_parts(scale, 0),
        _join_parts(codes_t, 1),
        _join_parts(scale_t, 1),
        amaxes,
        _merge_maxima([None if part is None else part.amax_t for part in parts], amax_t),
    )


def quantize_matrices_separately(
    matrices: Matrices, spec: QuantizeSpec, quantize_one: QuantizeOne
) -> GroupedQuantized:
    """Quantize each matrix [M, K] by `quantize_one`, in `GroupedMatrices` layouts."""
    parts = [quantize_one(matrix, spec) for matrix in matrices.tensors]
    codes, scale, codes_t, scale_t, amax, amax_t = [
        None if first is None else [member for part in parts if (member := part[i]) is not None]
        for i, first in enumerate(parts[0])
    ]
    stacks = [
        None if members is None else _join_parts([member[None] for member in members], 0)
        for members in (codes, scale, codes_t, scale_t)
    ]
    maxima = [None if members is None else torch.cat(members) for members in (amax, amax_t)]
    return GroupedQuantized(*stacks, *maxima)


def _merge_maxima(maxima: Sequence[Tensor | None], present: list[Tensor] | None) -> Tensor | None:
    """One maximum per group, 0 for a group without rows; None without a direction."""
    if present is None:
        return None
    absent = torch.zeros_like(present[0])
    return torch.cat([absent if amax is None else amax for amax in maxima])


def _join_parts(parts: list[Tensor] | None, dim: int) -> Tensor | None:
    """Concatenate bytes along an axis: torch cannot concatenate FP8 tensors on every device."""
    if parts is None:
        return None
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)

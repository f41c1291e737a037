"""The settings and results of a grouped quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..grouped_gemm import Groups, Matrices
from ..quantize import QuantizeSpec


class ScaleSlots(NamedTuple):
    """One scale per group: scale[offset + e * stride]; the amax of the same index becomes max(amax, max|x|).

    scale   float32, one dimension
    amax    float32 of as many elements, or with more rows, the first of which counts
    """

    scale: Tensor
    amax: Tensor
    stride: int
    offset: int

    def of_group(self, group: int) -> tuple[Tensor, Tensor]:
        """(scale [1], amax [1]) of a group, as views."""
        slot = self.offset + group * self.stride
        return self.scale[slot : slot + 1], self.amax.view(-1)[slot : slot + 1]


class GroupedQuantized(NamedTuple):
    """Codes of all groups; None where a direction was not asked for.

    Of groups of rows [total, K], how `GroupedRows` and `GroupedColumns` of `grouped_gemm` hold them; of matrices
    [M, K] codes [groups, M, K] and codes_t [groups, K, M], scales [groups, 4] or [groups, blocks, blocks].
    """

    codes: Tensor | None
    scale: Tensor | None
    codes_t: Tensor | None
    scale_t: Tensor | None


class GroupedQuantizeRequest(NamedTuple):
    """The facts a backend may judge.

    shape   of all rows, or of one matrix where there are matrices
    slots   of given scales: how far apart they are, and where the first is
    """

    spec: QuantizeSpec
    matrices: bool
    groups: int
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    slots: tuple[int, int] | None


# (rows [total, K] or matrices, the groups of rows, the given scales) -> codes
Call = Callable[["Tensor | Matrices", "Groups | None", "ScaleSlots | None"], GroupedQuantized]

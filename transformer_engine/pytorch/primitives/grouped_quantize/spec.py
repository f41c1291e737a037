"""The settings and results of a grouped quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..grouped_gemm import Groups, Matrices
from ..quantize import QuantizeSpec


class ScaleSlots(NamedTuple):
    """One scale per group: scale[offset + e * stride]; the amax at the same index becomes max(amax, max|x|).

    Attributes:
        scale: float32, one dimension.
        amax: float32 in the same size, or a matrix whose first row has that size.
        stride: Distance between the slots of consecutive groups.
        offset: The first group's slot index.
    """

    scale: Tensor
    amax: Tensor
    stride: int
    offset: int

    def of_group(self, group: int) -> tuple[Tensor, Tensor]:
        """Return (scale [1], amax [1]) of a group, as views."""
        slot = self.offset + group * self.stride
        return self.scale[slot : slot + 1], self.amax.view(-1)[slot : slot + 1]


class GroupedQuantized(NamedTuple):
    """Codes of all groups; None for directions that were not requested.

    For row groups [total, K], the layouts are as in `GroupedRows` and `GroupedColumns` of `grouped_gemm`. For
    matrices [M, K], codes are [groups, M, K], codes_t [groups, K, M] and scales [groups, 4] or [groups,
    blocks, blocks]. amax and amax_t are the maxima [groups] for formats with two scale levels.
    """

    codes: Tensor | None
    scale: Tensor | None
    codes_t: Tensor | None
    scale_t: Tensor | None
    amax: Tensor | None = None
    amax_t: Tensor | None = None


class GroupedQuantizeRequest(NamedTuple):
    """The properties by which a backend is chosen.

    Attributes:
        matrices: Whether the groups are matrices instead of rows.
        shape: Shape of all rows, or one matrix.
        slots: (stride, offset) for given scales, or None.
        tiled: Whether column codes of row groups are tiles of 128 rows.
    """

    spec: QuantizeSpec
    matrices: bool
    groups: int
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    slots: tuple[int, int] | None
    tiled: bool = False


# (rows [total, K] or matrices, the row groups, the given scales) -> codes
Call = Callable[["Tensor | Matrices", "Groups | None", "ScaleSlots | None"], GroupedQuantized]

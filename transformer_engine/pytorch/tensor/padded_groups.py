"""Quantization of consecutive row groups without reading group sizes on the host.

Groups are copied into a matrix in which each group begins at a multiple of 128 rows, the largest
block of any format. Quantizing this matrix once gives the same bits as quantizing each group. Every
shape follows from the group and row counts alone, so a CUDA graph can capture the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.formats import Element
from ..primitives.quantize import cast

TILE = 128


@dataclass(frozen=True)
class PaddedGroups:
    """Positions of n consecutive row groups in a matrix [total, K], as int64 tensors on its device.

    Attributes:
        rows: Rows per group [n].
        starts: First row per group, and the end [n + 1].
        padded_starts: The same in a matrix whose groups begin at multiples of 128 rows.
        total: Rows of the matrix; rows behind the last group belong to none.
    """

    rows: Tensor
    starts: Tensor
    padded_starts: Tensor
    total: int

    @classmethod
    def of(cls, rows: Tensor, total: int) -> PaddedGroups:
        """Compute the positions of groups with these row counts."""
        rows = rows.to(torch.int64)
        tiles = (rows + TILE - 1) // TILE
        return cls(rows, _starts(rows), _starts(tiles * TILE), total)

    @property
    def count(self) -> int:
        return self.rows.shape[0]

    @property
    def padded_total(self) -> int:
        """Upper bound on the padded rows, which does not depend on the groups' rows."""
        return (self.total // TILE + self.count) * TILE

    def group_of(self, positions: Tensor, starts: Tensor) -> Tensor:
        """Group of each position; `count` behind the last group."""
        return torch.bucketize(positions, starts[1:], right=True)

    def group_of_row(self) -> Tensor:
        """Group of each row [total]; `count` for rows of no group."""
        return self.group_of(self.numbers(self.total), self.starts)

    def padded_row(self) -> Tensor:
        """Row of the padded matrix of each row [total]."""
        group = self.group_of_row().clamp(max=self.count - 1)
        position = self.numbers(self.total) - self.starts[group] + self.padded_starts[group]
        return position.clamp(max=max(self.padded_total - 1, 0))

    def padded_groups(self) -> tuple[Tensor, Tensor]:
        """(group, row in the group) for each padded row; group `count` behind the last one."""
        numbers = self.numbers(self.padded_total)
        group = self.group_of(numbers, self.padded_starts)
        return group, numbers - self.padded_starts[group.clamp(max=self.count - 1)]

    def padded(self, x: Tensor) -> Tensor:
        """Copy x [total, K] into the padded matrix, with zeros in rows outside the groups."""
        group, local = self.padded_groups()
        inside = group.clamp(max=self.count - 1)
        used = (group < self.count) & (local < self.rows[inside])
        if self.total == 0:
            return x.new_zeros(self.padded_total, x.shape[1])
        source = (self.starts[inside] + local).clamp(max=self.total - 1)
        return torch.where(used[:, None], x.index_select(0, source), x.new_zeros(()))

    def transposed_row_scales(self, scale: Tensor) -> Tensor:
        """Scales of padded rows [padded rows, blocks] as [blocks, rows padded to 4] per group, flat."""
        group, local = self.padded_groups()
        used = local < self.rows[group.clamp(max=self.count - 1)]
        widths, size = (self.rows + 3) // 4 * 4, self.total + 3 * self.count
        return columns_of_groups(torch.where(used, scale.t(), 0.0), group, local, widths, size)

    def numbers(self, count: int) -> Tensor:
        """0, 1, .., count - 1."""
        return torch.arange(count, dtype=torch.int64, device=self.rows.device)


def _starts(extents: Tensor) -> Tensor:
    return torch.nn.functional.pad(extents.cumsum(0), (1, 0))


def maxima_of_groups(maxima: Tensor, groups: PaddedGroups, group_of: Tensor) -> Tensor:
    """Largest maximum per group, float32 [n]; 0 for a group without rows, NaN where one is NaN."""
    largest = torch.zeros(groups.count + 1, dtype=torch.float32, device=maxima.device)
    return largest.scatter_reduce(0, group_of, maxima, "amax")[: groups.count]


def index_groups(values: Tensor, group_of: Tensor) -> Tensor:
    """Each position's group value, from [n]; 1 for positions outside the groups."""
    return torch.cat((values, values.new_ones(1)))[group_of]


def columns_of_groups(
    matrix: Tensor, group: Tensor, local: Tensor, widths: Tensor, size: int
) -> Tensor:
    """Write the columns of each group as one contiguous matrix after another.

    Args:
        matrix: [D, C], whose columns belong to groups.
        group: Group of each column [C]; n for none.
        local: Index of each column in its group [C].
        widths: Columns in each group's result [n]; columns with local >= width are dropped.
        size: Total result columns, an upper bound.

    Returns:
        Flat matrices [D, widths[g]], at most D * size elements; zeros behind the last one.
    """
    depth = matrix.shape[0]
    starts, inside = _starts(widths), group.clamp(max=widths.shape[0] - 1)
    used = (group < widths.shape[0]) & (local < widths[inside])
    column = starts[inside] * depth + local
    rows = torch.arange(depth, dtype=torch.int64, device=matrix.device)[:, None]
    targets = torch.where(used[None], column[None] + rows * widths[inside][None], depth * size)
    flat = matrix.new_zeros(depth * size + 1)
    return flat.scatter_(0, targets.flatten(), matrix.flatten())[:-1]


def transposed_codes(codes_t: Tensor, groups: PaddedGroups, packing: int = 1) -> Tensor:
    """Transposed codes [K, padded rows / packing] as one matrix [K, rows / packing] per group."""
    group, local = (each[::packing] for each in groups.padded_groups())
    widths = groups.rows // packing
    return columns_of_groups(codes_t, group, local // packing, widths, groups.total // packing)


def transposed_scales(scale_t: Tensor, groups: PaddedGroups, rows: int) -> Tensor:
    """Transposed scales [K', padded rows / rows], as [K', blocks padded to 4] per group."""
    group, local = (each[::rows] for each in groups.padded_groups())
    blocks = (groups.rows + rows - 1) // rows
    widths, size = (blocks + 3) // 4 * 4, scale_t.shape[1] + 3 * groups.count
    local = local // rows
    if TILE // rows >= 4:  # the blocks of a padded group include the padding of its scales
        used = local < blocks[group.clamp(max=groups.count - 1)]
        scale_t = torch.where(used, scale_t, scale_t.new_zeros(()))
    return columns_of_groups(scale_t, group, local, widths, size)


def scaled_groups(
    x: Tensor,
    groups: PaddedGroups,
    scale: Tensor,
    element: Element,
    rowwise: bool,
    columnwise: bool,
) -> dict[str, Tensor]:
    """FP8 codes saturate(x * scale of its group) for x [total, K], by the keyword of `GroupedTensorStorage`."""
    group = groups.group_of_row()
    codes = cast(x.to(torch.float32) * index_groups(scale, group)[:, None], element).view(
        torch.uint8
    )
    inverse, buffers = scale.reciprocal(), {"scale": scale}
    if rowwise:
        buffers |= {"rowwise_data": codes, "scale_inv": inverse}
    if columnwise:
        local = groups.numbers(groups.total) - groups.starts[group.clamp(max=groups.count - 1)]
        codes_t = columns_of_groups(codes.t(), group, local, groups.rows, groups.total)
        buffers |= {"columnwise_data": codes_t, "columnwise_scale_inv": inverse}
    return buffers


class EncodesGroups:
    """Methods for quantizers that read row groups without their row counts on the host."""

    def groups_unsupported_reason(self) -> str | None:
        """Reason why `encode_groups` is unsupported, or None."""
        return f"{type(self).__name__} quantizes one tensor at a time"

    def encode_groups(self, x: Tensor, groups: PaddedGroups) -> dict[str, Tensor]:
        """Codes and scales for row groups of x [total, K] by `GroupedTensorStorage` keyword, row-major.

        The bits equal `encode` per group.
        """
        raise NotImplementedError(self.groups_unsupported_reason())

"""Groups: positions of consecutive row groups; Matrices: one matrix per group. The host needs neither.

Kernels read both from small tensors on the device: the layout that `common/kernels/grouped_layout` describes,
and an address table. Number tables known on the host are cached, so that a repeated call copies nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import ceil_div
from ....common.kernels import launch
from ...runtime.device import current_hardware
from ...runtime.device_tables import DeviceTables
from ...runtime.launching import run

TILE_ROWS = 128  # equal to common/kernels/grouped_layout, whose import requires Triton

_KEPT_TABLES = 1024
_Numbers = tuple[torch.device, torch.dtype, tuple[int, ...]]


def cached_on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device, cached for later calls; the host does not wait.

    Raises:
        RuntimeError: A graph is being captured, and no earlier call has cached the numbers.
    """
    table = _tables.get((device, dtype, numbers), device)
    if table is None:
        raise RuntimeError(
            "a graph is being captured, and sizes or addresses of the groups that it needs are not on the GPU yet; "
            "call the layer once with the same sizes before capturing"
        )
    return table


def _copy_key(key: _Numbers) -> Tensor:
    device, dtype, numbers = key
    table = torch.tensor(numbers, dtype=dtype, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_tables: DeviceTables[_Numbers, Tensor] = DeviceTables(_copy_key, _KEPT_TABLES)


class Groups(NamedTuple):
    """`count` consecutive row groups in a matrix with `total` rows.

    Attributes:
        count: Group count.
        total: Row count of the matrix.
        rows: Rows per group if known on the host, otherwise None.
        layout: int32 on the matrix's device: first row and first 128-row tile for every group and
            the end [2 x (count + 1)], then the group of every tile (count: no such tile).
        padded: Sum of the groups' rows, each rounded up to 128. If the rows are unknown on the host, an upper bound.
        fits: Whether the rows are known on the host and every group's row count is a multiple of 16.
    """

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    total: int
    rows: tuple[int, ...] | None
    layout: Tensor
    padded: int
    fits: bool = False

    @property
    def read_rows(self) -> tuple[int, ...]:
        """Return the rows of each group; the host waits for the device if it does not know them."""
        if self.rows is not None:
            return self.rows
        starts = self.layout[: self.count + 1].tolist()
        return tuple(end - start for start, end in itertools.pairwise(starts))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return each group's rows in a matrix [total, ..], without rows behind the last group."""
        rows = self.read_rows
        return x[: sum(rows)].split(rows)


def tiles_at_most(total: int, count: int) -> int:
    """Return the maximum number of 128-row tiles: each group has at most one partly filled tile."""
    return total // TILE_ROWS + count


def make_groups(splits: Sequence[int] | Tensor, total: int, device: torch.device) -> Groups:
    """Return the groups in a matrix with `total` rows on `device`, with `splits` rows each.

    A tensor on the device is not copied to the host or checked: rows past `total` are ignored.

    Raises:
        ValueError: Numbers on the host are negative or do not add up to `total`.
    """
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.is_floating_point():
            raise ValueError(
                f"splits is {splits.dtype} {list(splits.shape)}; give one integer per group, in one dimension"
            )
        if (
            splits.is_cuda
            and device.type == "cuda"
            and launch.unavailable_reason(current_hardware()) is None
        ):
            from ....common.kernels import grouped_layout

            count = splits.shape[0]
            (layout,) = run(grouped_layout.group_layout(total, count), (splits.contiguous(),))
            return Groups(count, total, None, layout, tiles_at_most(total, count) * TILE_ROWS)
        splits = splits.tolist()
    rows = tuple(splits)
    numbers, padded, fits = _layout(rows, total)
    return Groups(
        len(rows), total, rows, cached_on_device(numbers, torch.int32, device), padded, fits
    )


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _layout(rows: tuple[int, ...], total: int) -> tuple[tuple[int, ...], int, bool]:
    """Return the layout numbers, `Groups.padded` and `Groups.fits`.

    Raises:
        ValueError: Row counts are negative or do not add up to `total`.
    """
    if sum(rows) != total or min(rows, default=-1) < 0:
        raise ValueError(
            f"splits={list(rows)} must be numbers >= 0 that add up to the {total} rows"
        )
    starts, tiles, group_of_tile = [0], [0], []
    for group, extent in enumerate(rows):
        count = ceil_div(extent, TILE_ROWS)
        starts.append(starts[-1] + extent)
        tiles.append(tiles[-1] + count)
        group_of_tile += [group] * count
    absent = tiles_at_most(starts[-1], len(rows)) - len(group_of_tile)
    numbers = (*starts, *tiles, *group_of_tile, *[len(rows)] * absent)
    return numbers, tiles[-1] * TILE_ROWS, not any(extent % 16 for extent in rows)


class Matrices(NamedTuple):
    """One contiguous matrix [rows, columns] per group, in one dtype, not copied: an address table on a GPU."""

    tensors: tuple[Tensor, ...]
    table: Tensor | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Matrices:
        """Return the matrices. The addresses are read in every call, because a tensor's storage may change."""
        first = tensors[0]
        if not first.is_cuda:
            return cls(tuple(tensors), None)
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        return cls(tuple(tensors), cached_on_device(addresses, torch.int64, first.device))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensors[0].shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


def irregular(tensors: Sequence[Tensor]) -> str | None:
    """Return the reason why tensors cannot be Matrices, or None."""
    first = tensors[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    for tensor in tensors:
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            return "the matrices differ in shape, dtype or device"
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return "a matrix is not contiguous, or does not begin at a multiple of 16 bytes"
    return None

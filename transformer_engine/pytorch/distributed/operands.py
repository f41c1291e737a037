"""Gathering quantized operands: codes and scales of a matrix whose rows are sharded over ranks.

The row direction of a shard is [m, K], and of n ranks [n * m, K]: shards are joined along the first
axis. The column direction of a shard is [K, m], and of n ranks [K, n * m]: shards are joined along
the last axis, which copies the received bytes once. Block scales are gathered with the codes; one
scale per tensor is equal on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..constants import dist_group_type
from ..primitives.operand import Operand
from ..primitives.scale_order import row_major
from .collectives import DeferredGather, gather_rows, world_size
from .faults import NamedWork


class _Received(NamedTuple):
    """Bytes [n * rows, ..] of all ranks, in flight.

    Attributes:
        bytes: The buffer.
        work: Collective handle.
        dtype: Value dtype.
    """

    bytes: Tensor
    work: NamedWork | DeferredGather | None
    dtype: torch.dtype

    def wait(self, ranks: int, axis: int) -> Tensor:
        """Return the joined values."""
        if self.work is not None:
            self.work.wait()
        joined = self.bytes
        if axis == 1:
            rows = joined.shape[0] // ranks
            joined = joined.view(ranks, rows, -1).permute(1, 0, 2).reshape(rows, -1)
        return joined.view(self.dtype)


class PendingOperand:
    """An operand whose codes and scales are being gathered.

    Args:
        shard: This rank's operand.
        codes: Received codes.
        scale: Received block scales; None for one scale per tensor.
        ranks: Rank count.
        axis: Operand axis that shards are joined along.
    """

    __slots__ = ("_axis", "_codes", "_operand", "_ranks", "_scale")

    def __init__(
        self, shard: Operand, codes: _Received, scale: _Received | None, ranks: int, axis: int
    ):
        # Without the codes of the shard: the caller frees them while the collective runs.
        self._operand = (None if scale is not None else shard.scale, *shard[2:])
        self._codes, self._scale = codes, scale
        self._ranks, self._axis = ranks, axis

    def wait(self) -> Operand:
        """Return the gathered operand, complete for the current stream."""
        scale, form, amax, dtype = self._operand
        codes = self._codes.wait(self._ranks, self._axis)
        if self._scale is not None:
            scale = self._scale.wait(self._ranks, self._axis)
        return Operand(codes, scale, form, amax, dtype)


def gather_operand(
    operand: Operand, group: dist_group_type | None, axis: int = 0
) -> PendingOperand:
    """Start to gather a quantized operand from all ranks in a group.

    Args:
        operand: Codes and scales of this rank's rows [m, K] (axis 0), or of their column direction [K, m] (axis 1). The
            rows are a multiple of the format's blocks, and one scale per tensor is equal on all ranks.
        group: The process group.
        axis: Operand axis that shards are joined along.

    Returns:
        The pending operand, whose `wait` returns [n * m, K] or [K, n * m].
    """
    operand = row_major(operand)
    blocks = operand.scale if operand.has_block_scales else None
    return PendingOperand(
        operand,
        _start_byte_gather(operand.codes, group),
        None if blocks is None else _start_byte_gather(blocks, group),
        world_size(group),
        axis,
    )


def _start_byte_gather(part: Tensor, group: dist_group_type | None) -> _Received:
    """Start to gather a matrix as bytes, which every backend carries."""
    # One-column scales are contiguous with any stride, and a view as bytes needs stride 1.
    flat = part.contiguous().view(-1).view(torch.uint8)
    shape = (*part.shape[:-1], part.shape[-1] * part.element_size())
    received, work = gather_rows(flat.view(shape), group, async_op=True)
    return _Received(received, work, part.dtype)

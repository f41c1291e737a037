"""Sums and means over the last axis whose bits for a row depend on the row only, for references on a CPU.

torch divides a single row of 32768 or more elements among threads, and sums several rows one by one. It sums several
rows that are not contiguous in one vector, in an order that depends on their number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...common.dispatch import requirements


def sum_rows(x: Tensor) -> Tensor:
    """Compute x.sum(-1)."""
    return _reduce_rows(Tensor.sum, x)


def mean_rows(x: Tensor, axis: int) -> Tensor:
    """Compute x.mean(axis), in place of `Tensor.mean`; the axis is the last one."""
    assert axis == -1
    return _reduce_rows(Tensor.mean, x)


def _reduce_rows(reduce: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    if not requirements.batch_invariant or x.is_cuda:
        return reduce(x, -1)
    x = x.contiguous()
    if x.numel() == x.shape[-1]:
        return reduce(torch.cat((x, x)), -1)[: x.shape[0]]
    return reduce(x, -1)

"""Sums over the last axis whose bits for a row depend on the row only, for references on a CPU.

torch divides a single row of 32768 or more elements among threads, and sums several rows one by one. It sums several
rows that are not contiguous in one vector, in an order that depends on their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.dispatch import requirements


def sum_rows(x: Tensor) -> Tensor:
    """Compute x.sum(-1)."""
    if not requirements.batch_invariant or x.is_cuda:
        return x.sum(-1)
    x = x.contiguous()
    if x.numel() == x.shape[-1]:
        return torch.cat((x, x)).sum(-1)[: x.shape[0]]
    return x.sum(-1)

"""Sums and curves in torch operations whose bits for a row depend on the row only, for references on a CPU.

torch's own operations have two exceptions on a CPU (torch 2.13). A single row of 32768 or more elements is summed in
parts, one per thread. torch.sigmoid computes the last elements of a tensor, which fill no vector register, by another
formula; exp, log1p, reciprocal and tanh do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.dispatch import is_batch_invariant


def sum_rows(x: Tensor) -> Tensor:
    """Compute x.sum(-1)."""
    return torch.cat((x, x)).sum(-1)[: x.shape[0]] if _is_split(x) else x.sum(-1)


def mean_rows(x: Tensor) -> Tensor:
    """Compute x.mean(-1)."""
    return torch.cat((x, x)).mean(-1)[: x.shape[0]] if _is_split(x) else x.mean(-1)


def _is_split(x: Tensor) -> bool:
    """Whether the threads may divide a row among them, which must not be: x is a single row."""
    return is_batch_invariant() and not x.is_cuda and x.numel() == x.shape[-1]


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) for float32 values."""
    return torch.reciprocal(1.0 + torch.exp(-x))

"""Products and sums for dense attention in constant-size blocks, added in the keys' or queries' order.

The bits of a query's result then depend on its own keys only: not on the query count, hidden keys or other
sequences. A library's product adds in an order that depends on the extents. A hidden
key adds zero, which changes no bits. Row counts are padded to multiples of `ROWS`, see `primitives/gemm/any_rows.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.formats import round_up
from ...runtime.autograd import multiply_without_autocast
from ..gemm.any_rows import ROWS

BLOCK = 64


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Compute q [.., i, d] @ k [.., j, d].T, one product per block of keys."""
    rows, keys = q.shape[-2], k.shape[-2]
    q, k = _pad(q, -2, ROWS), _pad(k, -2, BLOCK)
    blocks = [
        multiply_without_autocast(q, block.transpose(-1, -2)) for block in k.split(BLOCK, dim=-2)
    ]
    return torch.cat(blocks, dim=-1)[..., :rows, :keys]


def sum_over_keys(p: Tensor, v: Tensor) -> Tensor:
    """Compute p [.., i, j] @ v [.., j, d], adding one block of keys after another."""
    rows = p.shape[-2]
    p, v = _pad(_pad(p, -2, ROWS), -1, BLOCK), _pad(v, -2, BLOCK)
    products = map(multiply_without_autocast, p.split(BLOCK, dim=-1), v.split(BLOCK, dim=-2))
    return _add(products)[..., :rows, :]


def sum_over_queries(p: Tensor, x: Tensor) -> Tensor:
    """Compute p [.., i, j].T @ x [.., i, d], adding one block of queries after another."""
    return sum_over_keys(p.transpose(-1, -2), x)


def row_sums(x: Tensor) -> Tensor:
    """Compute sum_j x [.., j], adding one block after another."""
    blocks = _pad(x, -1, BLOCK).split(BLOCK, dim=-1)
    return _add([block.contiguous().sum(dim=-1) for block in blocks])


def _pad(x: Tensor, axis: int, multiple: int) -> Tensor:
    """Pad an axis (-1 or -2) with zeros to a multiple."""
    missing = round_up(x.shape[axis], multiple) - x.shape[axis]
    if missing == 0:
        return x
    return F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))


def _add(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors in order."""
    return functools.reduce(operator.add, parts)

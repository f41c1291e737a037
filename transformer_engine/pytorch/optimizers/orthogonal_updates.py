"""Orthogonal factors for matrices in updates: matrix views, stacks by shape, Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .newton_schulz import CoeffT, get_coefficient_iterator

# Element count of the matrices stacked for one product batch; a larger matrix is iterated by itself.
_STACKED = 1 << 26


def part_matrices(full: Tensor, split: Sequence[int] | None) -> list[Tensor]:
    """Views of the n matrices in each part of a parameter [.., out, in].

    Returns:
        [n, rows, columns] for whole matrices; [n, repeats, rows, columns] for each part of `split`,
        whose repeats are one matrix, such as the queries of all groups.
    """
    stack = full.view(-1, *full.shape[-2:])
    if split is None:
        return [stack]
    return list(stack.unflatten(1, (-1, sum(split))).split(list(split), dim=2))


def orthogonalize(
    matrices: Iterable[Tensor], coefficients: Sequence[CoeffT], eps: float, dtype: torch.dtype
) -> None:
    """Replace matrices [n, rows, columns], or [n, repeats, rows, columns], by their orthogonal factors, in place."""
    waiting: dict[tuple[Any, ...], list[Tensor]] = {}
    for matrix in matrices:
        rows = math.prod(matrix.shape[1:-1])
        waiting.setdefault((rows, matrix.shape[-1], matrix.device), []).append(matrix)
    for (rows, columns, _), stacks in waiting.items():
        most = max(1, _STACKED // max(1, rows * columns))
        batch: list[Tensor] = []
        for single in (one for stack in stacks for one in stack.split(most)):
            if batch and sum(len(one) for one in batch) + len(single) > most:
                _iterate(batch, (rows, columns), coefficients, eps, dtype)
                batch = []
            batch.append(single)
        _iterate(batch, (rows, columns), coefficients, eps, dtype)


def _iterate(
    batch: list[Tensor],
    shape: tuple[int, int],
    coefficients: Sequence[CoeffT],
    eps: float,
    dtype: torch.dtype,
) -> None:
    """Iterate equally shaped matrices in batched products, and write the results over them."""
    x = torch.cat([matrix.reshape(-1, *shape).to(dtype) for matrix in batch])
    wide = shape[0] <= shape[1]
    if not wide:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply_add = torch.baddbmm
    if len(x) == 1:  # as torch.optim.Muon, bit for bit
        x, multiply_add = x[0], torch.addmm
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    x = (x if wide else x.mT).reshape(-1, *shape)
    for matrix, result in zip(batch, x.split([len(matrix) for matrix in batch]), strict=True):
        matrix.copy_(result.reshape(matrix.shape))


def iteration_coefficients(coefficients: Sequence[Any], steps: int) -> list[CoeffT]:
    """(a, b, c) for each iteration."""
    sets = (
        [tuple(coefficients)]
        if isinstance(coefficients[0], (int, float))
        else [tuple(one) for one in coefficients]
    )
    return list(get_coefficient_iterator(steps, sets, "repeat_last"))

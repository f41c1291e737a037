"""Orthogonal factors for matrices in updates: matrix views, stacks by shape, Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives.symmetric_product import TABLE, symmetric_product
from .newton_schulz import CoeffT, get_coefficient_iterator

# Element count of the matrices stacked for one product batch; a larger matrix is iterated by itself.
_STACKED = 1 << 26


def part_matrices(full: Tensor, split: Sequence[int] | None) -> list[Tensor]:
    """Views of the n matrices in each part of a parameter [.., out, in].

    Returns:
        [n, rows, columns] for whole matrices; [n, repeats, rows, columns] for each part of `split`,
        whose repeats are one matrix, such as the queries of all groups.
    """
    stack = full.view(math.prod(full.shape[:-2]), *full.shape[-2:])
    if split is None:
        return [stack]
    return list(
        stack.unflatten(1, (stack.shape[1] // sum(split), sum(split))).split(list(split), dim=2)
    )


def orthogonalize(
    matrices: Iterable[Tensor],
    coefficients: Sequence[CoeffT],
    eps: float,
    dtype: torch.dtype | None,
) -> None:
    """Replace matrices [n, rows, columns], or [n, repeats, rows, columns], by their orthogonal factors, in place.

    Args:
        matrices: The matrices; those without elements have no factors.
        coefficients: (a, b, c) for each iteration.
        eps: Least norm that a matrix is divided by.
        dtype: Iteration dtype; float16 iterates by symmetric products. None: float16 where a kernel computes these
            products, otherwise bfloat16.
    """
    waiting: dict[tuple[Any, ...], list[Tensor]] = {}
    for matrix in matrices:
        if not matrix.numel():
            continue
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
    dtype: torch.dtype | None,
) -> None:
    """Iterate equally shaped matrices in batched products, and write the results over them."""
    if dtype is None:
        dtype = _fastest_dtype(batch[0], shape)
    if dtype == torch.float16:
        _write(batch, _iterate_symmetric(batch, shape, coefficients, eps))
        return
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
    _write(batch, (x if wide else x.mT).reshape(-1, *shape))


def _write(batch: list[Tensor], x: Tensor) -> None:
    """Write results [n, rows, columns] over the matrices of a batch."""
    for matrix, result in zip(batch, x.split([len(matrix) for matrix in batch]), strict=True):
        matrix.copy_(result.reshape(matrix.shape))


def _fastest_dtype(matrix: Tensor, shape: tuple[int, int]) -> torch.dtype:
    """float16 if a kernel multiplies these matrices symmetrically, otherwise bfloat16."""
    request = ((1, min(shape), max(shape)), torch.float16, matrix.device, True)
    return torch.bfloat16 if TABLE.name_of(request) == "reference" else torch.float16


# Rounding errors of the Gram matrix grow in each iteration by a^2, the square of the polynomial's slope at 0, and would
# replace small singular values. Iterations are joined up to this growth: the first Gram matrix has the widest range.
_FIRST_GROWTH, _FURTHER_GROWTH = 20.0, 150.0


def _joined_counts(coefficients: Sequence[CoeffT]) -> list[int]:
    """Numbers of iterations between two products with x."""
    counts, growth = [1], 1.0
    for a, _, _ in coefficients[:-1]:
        growth *= a * a
        if growth <= (_FIRST_GROWTH if len(counts) == 1 else _FURTHER_GROWTH):
            counts[-1] += 1
        else:
            counts.append(1)
            growth = 1.0
    return counts


def _iterate_symmetric(
    batch: list[Tensor], shape: tuple[int, int], coefficients: Sequence[CoeffT], eps: float
) -> Tensor:
    """Iterate in float16, by products that are symmetric matrices wherever possible.

    All matrices of the iteration are polynomials of the Gram matrix G = x x^T [M, M], times x [M, N]:

        Z = b G + c G^2, x' = (a + Z) x, G' = (a + Z) G (a + Z).

    If x is wider than high, two or three iterations are joined in Q = .. (a' + Z') (a + Z) [M, M], and x is multiplied
    once by Q: five iterations multiply 2 (N / M) + 14 / 3 times as much as one general product [M, M] x [M, M] does,
    instead of 10 (N / M) + 5 times. float16 has three more bits than bfloat16, so that errors are smaller than those
    of general products in bfloat16; all values are at most about 30.

    Returns:
        Results [n, rows, columns].
    """
    wide = shape[0] <= shape[1]
    x = _normalized(batch, shape, wide, eps)
    counts = [1] * len(coefficients) if shape[0] == shape[1] else _joined_counts(coefficients)
    start = 0
    for count in counts:
        x = _joined_iterations(x, coefficients[start : start + count])
        start += count
    return x if wide else x.mT


def _normalized(batch: list[Tensor], shape: tuple[int, int], wide: bool, eps: float) -> Tensor:
    """Matrices divided by their norms, in float16 [n, M, N] with M <= N; each is read twice and written once."""
    parts = [matrix.reshape(-1, *shape) for matrix in batch]
    rows, columns = shape if wide else shape[::-1]
    x = parts[0].new_empty((sum(map(len, parts)), rows, columns), dtype=torch.float16)
    norms = [
        torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        for part in parts
    ]
    factors = torch.cat(norms).clamp(min=eps).reciprocal()
    start = 0
    for part in parts:
        end = start + len(part)
        target = x[start:end] if wide else x[start:end].mT
        torch.mul(part, factors[start:end], out=target)
        start = end
    return x


def _joined_iterations(x: Tensor, coefficients: Sequence[CoeffT]) -> Tensor:
    """Compute a few iterations of x [n, M, N], with one product by x."""
    gram = symmetric_product(x, x)
    q = None
    for number, (a, b, c) in enumerate(coefficients):
        z = symmetric_product(gram, gram, gram, alpha=c, beta=b)
        last = number == len(coefficients) - 1
        if last and q is None:
            return torch.baddbmm(x, z, x, beta=a)  # (a + Z) x
        if not last:
            half = symmetric_product(gram, z, gram, beta=a)  # G (a + Z)
            gram = symmetric_product(z, half, half, beta=a)
        if q is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = z
        else:
            q = symmetric_product(q, z, q, beta=a)  # Q (a + Z)
    assert q is not None
    return torch.bmm(q, x)


def iteration_coefficients(coefficients: Sequence[Any], steps: int) -> list[CoeffT]:
    """(a, b, c) for each iteration."""
    sets = (
        [tuple(coefficients)]
        if isinstance(coefficients[0], (int, float))
        else [tuple(one) for one in coefficients]
    )
    return list(get_coefficient_iterator(steps, sets, "repeat_last"))

"""Bytes that torch's CUDA sum over the leading axes of a tensor takes for partial sums while it runs.

The sum of [rows, columns] over its rows is split over blocks of threads, and every thread leaves its partial sums in
global memory: 128 MiB for a bfloat16 matrix of 4096 x 4096. The split is that of torch's Reduce.cuh (setReduceConfig).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ...common.formats import ceil_div

_THREADS = 512  # most threads of a block
_RESIDENT = 2048  # most threads of a multiprocessor
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that one thread adds up


def scratch_of(operation: Any, arguments: Any, processors: int) -> int:
    """Bytes for one call of a torch operation on a GPU with so many multiprocessors; 0 for all but such sums."""
    if operation is not torch.ops.aten.sum.dim_IntList:
        return 0
    x, axes = arguments[0], arguments[1]
    if not isinstance(x, Tensor) or not x.is_contiguous() or x.dtype == torch.float64:
        return 0
    count = len(axes)
    if not 0 < count < x.dim() or sorted(axis % x.dim() for axis in axes) != list(range(count)):
        return 0
    return sum_over_rows(prod(x.shape[:count]), prod(x.shape[count:]), processors)


def sum_over_rows(rows: int, columns: int, processors: int) -> int:
    """float32 partial sums of [rows, columns] -> [columns]; 0 where one block of threads adds up whole columns."""
    if not rows or not columns:
        return 0
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = _THREADS // vector
    across = min(_power_of_two(columns // vector), most)
    width = min(across, _WARP)
    height = min(_power_of_two(rows), most // width)
    width = min(across, most // height)
    splits_rows = rows >= height * _FEWEST_VALUES or rows >= _MOST_VALUES
    values = ceil_div(rows, height) if splits_rows else rows
    blocks = ceil_div(columns // vector, width)
    target = processors * (_RESIDENT // (width * height))
    if not splits_rows or values < _MOST_VALUES or blocks > target:
        return 0
    shares = max(
        min(ceil_div(target, blocks), ceil_div(values, _FEWEST_VALUES)), ceil_div(values, _MOST_VALUES)
    )
    return 4 * columns * shares * width * vector if shares > 1 else 0


def _power_of_two(value: int) -> int:
    """The largest one that is not above value."""
    return 1 << (value.bit_length() - 1)

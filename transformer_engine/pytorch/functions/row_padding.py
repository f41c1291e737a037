"""Groups of rows of x [sum m_i, K], each padded by zeros to a given number of rows, and back; differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..primitives.grouped_gemm.groups import on_device
from ..primitives.permutation import INDEX, Routes, rows_of_segments
from .permutation import permute, unpermute


def pad_rows(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Tensor:
    """[sum of padded, K]: group i has padded[i] rows, its own and then zeros."""
    return permute(x, _routes(x, rows, padded), sum(padded))[0]


def unpad_rows(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Tensor:
    """[sum of rows, K] of x [sum of padded, K]: the first rows[i] of each group; the gradient of the rest is zero."""
    return unpermute(x, _routes(x, rows, padded))


def _routes(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Routes:
    tokens = sum(rows)
    # First row, rows and first padded row of every group.
    firsts, padded_firsts = ([0, *accumulate(sizes)][:-1] for sizes in (rows, padded))
    numbers = (*firsts, *rows, *padded_firsts)
    if torch.compiler.is_compiling():
        segments = torch.tensor(numbers, dtype=torch.int32, device=x.device)
    else:
        segments = on_device(numbers, torch.int32, x.device)
    return Routes(rows_of_segments(segments.view(3, -1), tokens), INDEX, tokens, 1)

"""a [M, K] @ b [K, N] in torch operations on a CPU, with bits of a row that do not depend on M.

The libraries behind torch.mm compute one to seven rows by other kernels than more rows, in another order of the sum
(MKL: float32 with up to 3 rows on one thread and up to 7 on eight; bfloat16 with one row). With a multiple of 16
contiguous rows, the bits of a row were equal for all row counts up to 2100 on 1, 2, 3 and 8 threads.
`tests/module/test_batch_invariance.py` compares the layers that call these products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....common.formats import round_up
from ...runtime.autograd import matrix_product

ROWS = 16


def pad_rows(a: Tensor) -> Tensor:
    """Return contiguous rows whose count is a multiple of `ROWS`; the added rows are zero."""
    rows = a.shape[0]
    return F.pad(a, (0, 0, 0, round_up(rows, ROWS) - rows)) if rows % ROWS else a.contiguous()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Compute a [M, K] @ b [K, N]."""
    return first_rows(matrix_product(pad_rows(a), b), a.shape[0])


def multiply_add(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute bias [N] + a [M, K] @ b [K, N] with one rounding."""
    return first_rows(torch.addmm(bias, pad_rows(a), b), a.shape[0])


def first_rows(padded: Tensor, rows: int) -> Tensor:
    return padded if padded.shape[0] == rows else padded[:rows].clone()

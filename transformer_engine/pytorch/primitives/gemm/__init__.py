"""out [M, N] = a [M, K] @ b [N, K].T, then the epilogue: one product for every format and every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Table
from ..operand import Operand, plain
from . import matmul, reference, scaled_mm, widen
from .request import Epilogue, GemmRequest

__all__ = ["TABLE", "Epilogue", "GemmRequest", "Operand", "gemm", "plain"]

TABLE: Table[GemmRequest] = Table(
    "gemm",
    (matmul.BACKEND, scaled_mm.TENSOR_SCALES, scaled_mm.BLOCK_SCALES, widen.BACKEND, reference.BACKEND),
)


def gemm(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """out [M, N] = a [M, K] @ b [N, K].T (+ bias [N]) in epilogue.dtype; both operands end in the contracted axis.

    With epilogue.out the result is written there (accumulate=True: added to it) and returned.
    Raises ValueError when the contracted extents differ and Unsupported when no backend takes the formats.
    """
    if a.depth != b.depth:
        raise ValueError(
            f"the operands contract {a.depth} and {b.depth} elements; both must end in the same K"
        )
    if a.rows == 0 or b.rows == 0 or a.depth == 0:
        return _nothing_to_multiply(a, b, epilogue)
    return TABLE.select(GemmRequest.of(a, b, epilogue)).run(a, b, epilogue)


def _nothing_to_multiply(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
    """A sum over no elements is zero; a result without rows is empty."""
    zeros = torch.zeros(a.rows, b.rows, dtype=torch.float32, device=a.codes.device)
    return epilogue.finish(zeros)

"""Operand: a matrix [rows, K] as a product reads it, quantized or not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.formats import TensorFormat

# The two ways a product reads a quantized matrix [rows, K].
COLS = "cols"  # contracts K: the row-wise codes [rows, K]
ROWS = "rows"  # contracts rows: the column-wise codes, transposed, [K, rows]


class Operand(NamedTuple):
    """codes [rows, K] (NVFP4: uint8 [rows, K / 2], low nibble first); the contracted axis K comes last.

    codes   fp8 in a torch float8 dtype, NVFP4 packed in uint8, or high precision when format is None
    scale   factor of the codes: float32 [1], [rows, ceil(K/128)] or [ceil(rows/128), ceil(K/128)];
            MXFP8: uint8 exponents [rows, ceil(K/32)]; NVFP4: float8_e4m3fn [rows, ceil(K/16)]
    amax    NVFP4 only: float32 [1], the absolute maximum that determines the second-level scale, or [rows] where the
            format has one scale per row
    dtype   the nominal high-precision dtype of the values
    """

    codes: Tensor
    scale: Tensor | None = None
    format: TensorFormat | None = None
    amax: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def depth(self) -> int:
        """K, the number of contracted elements."""
        packing = 1 if self.format is None else self.format.packing
        return self.codes.shape[1] * packing


class OwnedOperand(Operand):
    """A matrix in a custom format: its class computes products, `multiplied(other, epilogue)`."""

    def multiplied(self, other: Operand, epilogue: Any) -> Tensor:
        raise NotImplementedError


def plain(matrix: Tensor) -> Operand:
    """A high-precision matrix [rows, K] as an operand."""
    return Operand(matrix, dtype=matrix.dtype)

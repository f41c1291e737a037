"""Operand: a matrix [rows, K] in a product, quantized or in high precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.formats import TensorFormat

# The two ways a product reads a quantized matrix [rows, K].
ROWWISE = "rowwise"  # codes [rows, K] for products that contract K
COLUMNWISE = "columnwise"  # transposed codes [K, rows] for products that contract the rows


class Operand(NamedTuple):
    """codes [rows, K] (NVFP4: uint8 [rows, K / 2], low nibble first) and scales; the contracted axis K is the last one.

    Attributes:
        codes: FP8 in a torch float8 dtype, NVFP4 packed in uint8, or high precision if format is None.
        scale: Code factor: float32 [1], [rows, ceil(K/128)] or [ceil(rows/128), ceil(K/128)];
            MXFP8: uint8 exponents [rows, ceil(K/32)]; NVFP4: float8_e4m3fn [rows, ceil(K/16)].
        format: Code format; None: high precision.
        amax: NVFP4 only: float32 [1], the absolute maximum that determines the second-level scale; [rows] if the format
            has one scale per row.
        dtype: Nominal high-precision dtype of the values.
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
    def has_block_scales(self) -> bool:
        """Whether scales belong to blocks, so that they are joined and split with the rows of the codes."""
        return self.scale is not None and self.format is not None and self.format.block is not None

    @property
    def depth(self) -> int:
        """Return K, the contracted length."""
        packing = 1 if self.format is None else self.format.packing
        return self.codes.shape[1] * packing


class OwnedOperand(Operand):
    """A matrix whose class computes products with an `Operand` itself, because of a custom format or without values."""

    def multiplied(self, other: Operand, epilogue: Any) -> Tensor:
        """self [M, K] @ other [N, K].T and the epilogue; see `gemm`."""
        raise NotImplementedError

    def multiply_gelu(self, other: Operand, epilogue: Any, keeps_input: bool) -> Any:
        """The results of `gemm_gelu`, or None if a product and an activation compute them."""
        return None

    def multiply_gelu_gradient(self, other: Operand, epilogue: Any, x: Tensor) -> Tensor | None:
        """The result of `gemm_gelu_gradient`, or None if a product and the gradient of an activation compute it."""
        return None


def plain(matrix: Tensor) -> Operand:
    """Return a high-precision matrix [rows, K] as an operand."""
    return Operand(matrix, dtype=matrix.dtype)

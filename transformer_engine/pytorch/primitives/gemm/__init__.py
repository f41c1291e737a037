"""out [M, N] = a [M, K] @ b [N, K].T, then the epilogue: one product for every format and every backend."""

from __future__ import annotations

from ..operand import Operand, plain
from .fused import gemm, gemm_gelu, gemm_gelu_gradient
from .product import DEQUANTIZING, TABLE, multiplies_natively
from .product import product as multiply
from .request import Epilogue, GemmRequest, as_matrix, products_depend_on_operands_alone

__all__ = [
    "DEQUANTIZING",
    "TABLE",
    "Epilogue",
    "GemmRequest",
    "Operand",
    "as_matrix",
    "gemm",
    "gemm_gelu",
    "gemm_gelu_gradient",
    "multiplies_natively",
    "multiply",
    "plain",
    "products_depend_on_operands_alone",
]

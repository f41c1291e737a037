"""MXFP8TensorStorage: value = code x 2^(e - 127), one exponent e for 32 elements in a row, or in a column.

Codes have the values' shape in both directions; the column-wise ones lie K-last in memory, so that a product along
rows reads them without a copy. Scales are padded with zeros: row-wise [pad128(M), pad4(K/32)], column-wise
[pad4(M/32), pad128(K)].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import MXFP8
from ...constants import DType
from ...primitives.operand import COLUMNWISE, Operand
from ..elements import nominal_dtype
from .block_scaled import BlockScaledStorage
from .quantized_tensor_storage import Writer

__all__ = ["MXFP8TensorStorage"]


class MXFP8TensorStorage(BlockScaledStorage):
    """FP8 codes and exponents as in OCP Microscaling Formats 1.0.

    Args:
        rowwise_scale_inv: Row-wise exponents uint8 (E8M0).
        columnwise_scale_inv: Column-wise exponents uint8 (E8M0).
        with_gemm_swizzled_scales: The exponents are in matrix-instruction order, column-wise
            exponents as for the transpose.
        square_tiles: 32 x 32 values share an exponent, so each direction is the transpose of the other.

    The other arguments are as in `Float8BlockwiseQTensorStorage`.
    """

    CONSTANTS = {
        "_fp8_dtype": "fp8_dtype",
        "_quantizer": "quantizer",
        "_square_tiles": "square_tiles",
        "_with_gemm_swizzled_scales": "with_gemm_swizzled_scales",
        "_dtype": "dtype",
    }
    format = MXFP8
    COLUMNS_TRANSPOSED = False

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Writer | None = None,
        with_gemm_swizzled_scales: bool = False,
        *,
        square_tiles: bool = False,
        fake_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ):
        rowwise, columnwise = (
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
        )
        nominal = nominal_dtype(fake_dtype, dtype) or torch.float32
        self._hold(rowwise, columnwise, fp8_dtype, quantizer, nominal)
        self._square_tiles = square_tiles
        self._set_swizzled(with_gemm_swizzled_scales)

    @property
    def transposable(self) -> bool:
        return self._square_tiles

    def contract(self, direction: str) -> Operand:
        scale = self._columnwise_scale_inv
        if direction == COLUMNWISE and scale is not None and scale.dim() > 2:
            raise RuntimeError(
                f"column-wise scales {list(scale.shape)} of an MXFP8 tensor {list(self.shape)} have blocks along its "
                "first axis, which no product contracts; dequantize() the tensor and quantize the values again"
            )
        return super().contract(direction)

    def _drop_padding(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        # Scales for queries [s, b, h, d] are [s, b, h, d / 32].
        matrix = scale if scale.dim() == 2 else scale.reshape(-1, scale.shape[-1])
        return super()._drop_padding(matrix, rows, columns)

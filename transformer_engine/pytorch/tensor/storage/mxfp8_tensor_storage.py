"""MXFP8TensorStorage: value = code x 2^(e - 127), one exponent e for 32 elements of a row, or of a column.

Codes have the values' shape in both directions; the column-wise ones lie K-last in memory, so that a product along
rows reads them without a copy. Scales are padded with zeros: row-wise [pad128(M), pad4(K/32)], column-wise
[pad4(M/32), pad128(K)].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.formats import MXFP8, ceil_div
from ...constants import DType
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized
from ..axis import COLS
from ..elements import float8_dtype
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import matrix_shape

if TYPE_CHECKING:
    from ..quantizer import Quantizer


class MXFP8TensorStorage(BlockScaledStorage):
    """OCP Microscaling Formats 1.0, FP8 elements."""

    TENSORS = {
        "_rowwise_data": "rowwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_data": "columnwise_data",
        "_columnwise_scale_inv": "columnwise_scale_inv",
    }
    CONSTANTS = {
        "_fp8_dtype": "fp8_dtype",
        "_quantizer": "quantizer",
        "_square_tiles": "square_tiles",
        "_dtype": "dtype",
    }
    format = MXFP8

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Quantizer | None = None,
        *,
        square_tiles: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._fp8_dtype = DType(fp8_dtype)
        self._quantizer = quantizer
        self._square_tiles = square_tiles
        self._dtype = dtype

    @property
    def shape(self) -> torch.Size:
        return self._first_tensor().shape

    @property
    def transposable(self) -> bool:
        return self._square_tiles

    def contract(self, axis: str) -> Operand:
        codes, scale = self._of(axis)
        rows, depth = matrix_shape(self.shape)
        codes = codes.reshape(rows, depth)
        if axis == COLS:
            scale = scale[:rows, : ceil_div(depth, 32)]
        else:
            codes, scale = codes.t(), scale.t()[:depth, : ceil_div(rows, 32)]
        return Operand(codes.view(float8_dtype(self._fp8_dtype)), scale, MXFP8, dtype=self._dtype)

    @classmethod
    def pack(cls, quantized: Quantized, shape: Sequence[int], **constants: Any) -> MXFP8TensorStorage:
        codes, scale, codes_t, scale_t = quantized[:4]
        return cls(
            rowwise_data=None if codes is None else codes.view(torch.uint8).view(shape),
            rowwise_scale_inv=None if scale is None else padded(scale, 128, 4),
            columnwise_data=None if codes_t is None else codes_t.view(torch.uint8).t().view(shape),
            columnwise_scale_inv=None if scale_t is None else padded(scale_t, 128, 4).t(),
            **constants,
        )

    def viewed(self, shape: Sequence[int]) -> MXFP8TensorStorage | None:
        if not len(shape) or shape[-1] != self.shape[-1]:
            return None
        rowwise, columnwise = self._rowwise_data, self._columnwise_data
        return MXFP8TensorStorage(
            rowwise_data=None if rowwise is None else rowwise.view(shape),
            rowwise_scale_inv=self._rowwise_scale_inv,
            columnwise_data=None if columnwise is None else columnwise.view(shape),
            columnwise_scale_inv=self._columnwise_scale_inv,
            **self.constants(),
        )

    def _undo_transform(self, values_t: Tensor) -> Tensor:
        return values_t

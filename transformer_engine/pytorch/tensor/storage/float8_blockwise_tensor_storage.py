"""Float8BlockwiseQTensorStorage: value = code x scale, one float32 scale for 1 x 128 or 128 x 128 elements.

Row-wise codes have the values' shape [..., K], column-wise codes are those of the transpose, [K, ...]. Scales are
padded with zeros to multiples of 4, of M x K values in 1 x 128 blocks: [ceil(K/128), pad4(M)], and
[ceil(M/128), pad4(K)] column-wise; in 128 x 128 blocks: [ceil(M/128), pad4(ceil(K/128))], and its transpose's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.formats import BLOCK_1D, BLOCK_2D, TensorFormat, ceil_div
from ...constants import DType
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized
from ..axis import COLS
from ..elements import float8_dtype
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import matrix_shape

if TYPE_CHECKING:
    from ..quantizer import Quantizer

GEMM_READY = 0


class Float8BlockwiseQTensorStorage(BlockScaledStorage):
    """FP8 in blocks of 128, as in "DeepSeek-V3 Technical Report" (arXiv:2412.19437)."""

    TENSORS = {
        "_rowwise_data": "rowwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_data": "columnwise_data",
        "_columnwise_scale_inv": "columnwise_scale_inv",
    }
    CONSTANTS = {
        "_fp8_dtype": "fp8_dtype",
        "_quantizer": "quantizer",
        "_is_2D_scaled": "is_2D_scaled",
        "_dtype": "dtype",
    }

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Quantizer | None = None,
        is_2D_scaled: bool = True,
        data_format: int = GEMM_READY,
        *,
        dtype: torch.dtype = torch.float32,
    ):
        if int(data_format) != GEMM_READY:
            raise ValueError(f"data_format={data_format!r} is not held here; only GEMM_READY (0) is")
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._fp8_dtype = DType(fp8_dtype)
        self._quantizer = quantizer
        self._is_2D_scaled = is_2D_scaled
        self._dtype = dtype

    @property
    def format(self) -> TensorFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        return BLOCK_2D if self._is_2D_scaled else BLOCK_1D

    @property
    def transposable(self) -> bool:
        return self._is_2D_scaled

    @property
    def shape(self) -> torch.Size:
        if self._rowwise_data is not None:
            return self._rowwise_data.shape
        transpose = self._first_tensor()
        return torch.Size((*transpose.shape[1:], *transpose.shape[:1]))

    def contract(self, axis: str) -> Operand:
        codes, scale = self._of(axis)
        rows, depth = matrix_shape(self.shape)
        if axis != COLS:
            rows, depth = depth, rows
        scale = scale[:, : ceil_div(depth, 128)] if self._is_2D_scaled else scale.t()[:rows]
        codes = codes.reshape(rows, depth).view(float8_dtype(self._fp8_dtype))
        return Operand(codes, scale, self.format, dtype=self._dtype)

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> Float8BlockwiseQTensorStorage:
        codes, scale, codes_t, scale_t = quantized[:4]
        square = constants["is_2D_scaled"]

        def stored(scale: Tensor | None) -> Tensor | None:
            if scale is None:
                return None
            return padded(scale, 1, 4) if square else padded(scale, 4, 1).t()

        data = None if codes is None else codes.view(torch.uint8)
        transpose = None if codes_t is None else codes_t.view(torch.uint8)
        if len(shape) != 2:
            data = None if data is None else data.view(shape)
            transpose = None if transpose is None else transpose.view((*shape[-1:], *shape[:-1]))
        return cls(
            rowwise_data=data,
            rowwise_scale_inv=stored(scale),
            columnwise_data=transpose,
            columnwise_scale_inv=stored(scale_t),
            **constants,
        )

    def viewed(self, shape: Sequence[int]) -> Float8BlockwiseQTensorStorage | None:
        if tuple(shape[-1:]) != tuple(self.shape[-1:]):
            return None
        rowwise, columnwise = self._rowwise_data, self._columnwise_data
        return Float8BlockwiseQTensorStorage(
            rowwise_data=None if rowwise is None else rowwise.view(shape),
            rowwise_scale_inv=self._rowwise_scale_inv,
            columnwise_data=None if columnwise is None else columnwise.reshape((*shape[-1:], *shape[:-1])),
            columnwise_scale_inv=self._columnwise_scale_inv,
            **self.constants(),
        )

    def _undo_transform(self, values_t: Tensor) -> Tensor:
        return values_t

"""Float8TensorStorage: value [..., K] = code x scale_inv [1], codes [..., K] and their transpose [K, ...] in uint8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import FLOAT8
from ...constants import DType
from ...primitives.gemm.cublaslt import reads_all_layouts
from ...primitives.operand import COLUMNWISE, ROWWISE, Operand
from ...primitives.quantize import Quantized, dequantize
from ...primitives.transpose import write_transposed
from ..elements import float8_dtype, float8_number, nominal_dtype
from .quantized_tensor_storage import QuantizedTensorStorage, Writer, matrix_shape

__all__ = ["Float8TensorStorage"]


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 codes and one scale for the whole tensor, from delayed or current scaling.

    Args:
        data: Codes uint8, or None if only the transpose exists.
        fp8_scale_inv: Factor float32 [1] that turns codes into values.
        fp8_dtype: kFloat8E4M3 or kFloat8E5M2.
        data_transpose: Transposed codes uint8, or None.
        quantizer: Quantizer that writes into this storage; None for read-only storages.
        fake_dtype: Nominal dtype.
        dtype: Alias for fake_dtype.
        transpose_invalid: The transpose is out of date and is dropped.
    """

    TENSORS = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    ROWWISE = ("_data",)
    COLUMNWISE = ("_transpose",)
    CONSTANTS = {"_fp8_dtype": "fp8_dtype", "_quantizer": "quantizer", "_dtype": "dtype"}
    format = FLOAT8

    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor | None

    def __init__(
        self,
        data: Tensor | None,
        fp8_scale_inv: Tensor | None,
        fp8_dtype: DType,
        data_transpose: Tensor | None = None,
        quantizer: Writer | None = None,
        *,
        fake_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        transpose_invalid: bool | None = None,
    ):
        self._data = data
        self._transpose = None if transpose_invalid else data_transpose
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype if type(fp8_dtype) is DType else float8_number(fp8_dtype)
        self._quantizer = quantizer
        self._dtype = nominal_dtype(fake_dtype, dtype) or torch.float32

    @property
    def shape(self) -> torch.Size:
        if self._data is not None:
            return self._data.shape
        transpose = self._first_tensor()
        return torch.Size((*transpose.shape[1:], transpose.shape[0]))

    @property
    def _transpose_invalid(self) -> bool:
        """Is there no usable transpose? Setting it drops the transpose, which update_usage makes again."""
        return self._transpose is None

    @_transpose_invalid.setter
    def _transpose_invalid(self, invalid: bool) -> None:
        if invalid:
            self._transpose = None

    def contract(self, direction: str) -> Operand:
        codes = self._data if direction == ROWWISE else self._transpose
        rows, depth = matrix_shape(self.shape)
        if codes is None:
            if direction == ROWWISE or self._data is None or not reads_all_layouts():
                raise self._missing(direction)
            codes = self._data.reshape(rows, depth).t()
        matrix = codes.reshape((rows, depth) if direction == ROWWISE else (depth, rows))
        return Operand(
            matrix.view(float8_dtype(self._fp8_dtype)), self._scale_inv, FLOAT8, dtype=self._dtype
        )

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> Float8TensorStorage:
        codes, scale, codes_t, scale_t, _, _ = quantized
        data = None if codes is None else codes.view(torch.uint8)
        transpose = None if codes_t is None else codes_t.view(torch.uint8)
        if len(shape) != 2:
            data = None if data is None else data.view(shape)
            transpose = None if transpose is None else transpose.view((*shape[-1:], *shape[:-1]))
        return cls(
            data=data,
            data_transpose=transpose,
            fp8_scale_inv=scale_t if scale is None else scale,
            **constants,
        )

    @property
    def transposable(self) -> bool:
        return True

    def rewrites_columns(self) -> bool:
        return self._data is not None and self._transpose is not None

    def write_columns(self, codes: Tensor) -> None:
        assert self._transpose is not None
        rows, depth = codes.shape
        write_transposed(codes, self._transpose.view(depth, rows))

    def _create_transpose(self) -> None:
        """Create the column-wise codes; sharded data parallelism calls this name."""
        self._mirror("column-wise", "columnwise")

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self._data is not None:
            return dequantize(self.contract(ROWWISE)._replace(dtype=dtype)).view(self.shape)
        return (
            dequantize(self.contract(COLUMNWISE)._replace(dtype=dtype))
            .t()
            .contiguous()
            .view(self.shape)
        )

    def with_shape(self, shape: Sequence[int]) -> Float8TensorStorage | None:
        keeps_columns = len(shape) > 0 and len(self.shape) > 0 and shape[-1] == self.shape[-1]
        if self._data is None and not keeps_columns:
            return None
        transpose = self._transpose if keeps_columns else None
        return Float8TensorStorage(
            data=None if self._data is None else self._data.view(shape),
            data_transpose=None
            if transpose is None
            else transpose.reshape((*shape[-1:], *shape[:-1])),
            fp8_scale_inv=self._scale_inv,
            **self.constants(),
        )

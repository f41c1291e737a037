"""Float8BlockwiseQTensorStorage: value = code x scale, one float32 scale for 1 x 128 or 128 x 128 elements.

Row-wise codes have the values' shape [..., K], column-wise codes the transposed shape, [K, ...]. Scales are padded
with zeros to multiples of 4; for M x K values in 1 x 128 blocks: [ceil(K/128), pad4(M)], and [ceil(M/128), pad4(K)]
column-wise; in 128 x 128 blocks: [ceil(M/128), pad4(ceil(K/128))], and its transposed counterpart column-wise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.formats import BLOCK_1D, BLOCK_2D, BLOCK_FORMATS, TensorFormat
from ...constants import DType
from ...primitives.quantize.encodings import is_power_of_two
from ..elements import nominal_dtype
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import QuantizedTensorStorage, Writer, matrix_shape

__all__ = ["Float8BlockwiseQTensorStorage"]

GEMM_READY = 0


class Float8BlockwiseQTensorStorage(BlockScaledStorage):
    """FP8 codes with scales for 128-value blocks, as in "DeepSeek-V3 Technical Report" (arXiv:2412.19437).

    Args:
        rowwise_data: Codes uint8 for products along the last dimension, or None.
        rowwise_scale_inv: Factors float32 that turn row-wise codes into values.
        columnwise_data: Codes uint8 for products along the rows, or None.
        columnwise_scale_inv: Factors float32 that turn column-wise codes into values.
        fp8_dtype: kFloat8E4M3 or kFloat8E5M2.
        quantizer: Quantizer that writes into this storage; None for read-only storages.
        is_2D_scaled: Blocks are 128 x 128 instead of 1 x 128.
        data_format: Accepted for compatibility.
        fake_dtype: Nominal dtype.
        dtype: Alias for fake_dtype.
        power_of_two: Every scale is a power of two, so that GPUs with MXFP8 products multiply by exponents.
    """

    CONSTANTS = {
        "_fp8_dtype": "fp8_dtype",
        "_quantizer": "quantizer",
        "_is_2D_scaled": "is_2D_scaled",
        "_power_of_two": "power_of_two",
        "_dtype": "dtype",
    }

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Writer | None = None,
        is_2D_scaled: bool = True,
        data_format: int | None = GEMM_READY,
        *,
        fake_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        power_of_two: bool = False,
    ):
        if data_format is not None and int(data_format) != GEMM_READY:
            raise ValueError(
                f"data_format={data_format!r} is unsupported; give scales in the layout GEMM_READY (0)"
            )
        rowwise, columnwise = (
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
        )
        nominal = nominal_dtype(fake_dtype, dtype) or torch.float32
        self._hold(rowwise, columnwise, fp8_dtype, quantizer, nominal)
        self._is_2D_scaled = is_2D_scaled
        self._power_of_two = power_of_two

    @property
    def format(self) -> TensorFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        return BLOCK_2D if self._is_2D_scaled else BLOCK_1D

    @property
    def transposable(self) -> bool:
        return self._is_2D_scaled

    def _direction_format(self, direction: str) -> TensorFormat:
        return BLOCK_FORMATS[bool(self._is_2D_scaled), self._power_of_two]

    def byte_layout(self) -> tuple[Any, ...]:
        # Both scale kinds replace each other: `copy_from_storage` adopts the kind.
        return self._fp8_dtype, self._is_2D_scaled

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> None:
        super().copy_from_storage(src, noop_flag=noop_flag)
        if noop_flag is None:
            self._power_of_two = True
        self.join_claims(src)  # with a flag, the device decides whose scales these are

    def join_claims(self, source: QuantizedTensorStorage | None) -> None:
        if source is None:
            scales = (self._rowwise_scale_inv, self._columnwise_scale_inv)
            self._power_of_two = all(x is None or is_power_of_two(x) for x in scales)
        else:
            self._power_of_two = self._power_of_two and getattr(source, "_power_of_two", False)

    def _drop_padding(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        return scale[:, :columns] if self._is_2D_scaled else scale.t()[:rows]

    def trim_rowwise_scales(self) -> None:
        scale = self._rowwise_scale_inv
        if not self._is_2D_scaled and scale is not None:
            self._rowwise_scale_inv = scale[:, : matrix_shape(self.shape)[0]].contiguous()

    @classmethod
    def _padded(cls, scale: Tensor, constants: dict[str, Any]) -> Tensor:
        return padded(scale, 1, 4) if constants["is_2D_scaled"] else padded(scale, 4, 1).t()

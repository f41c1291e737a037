"""NVFP4TensorStorage: value = code x s x amax / (6 x largest scale), with an E4M3 scale s per 16 elements.

Two codes per byte, low nibble first: row-wise [..., K/2], column-wise for the transpose [K, .../2]. Scales are E4M3
bytes padded with zeros, [pad128(M), pad4(ceil(K/16))], and likewise for the transpose. The column-wise codes may
encode Hadamard-transformed values: two such operands contract to the product of the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import NVFP4, NVFP4_FORMATS, TensorFormat
from ...constants import DType
from ...primitives.operand import ROWWISE
from ...primitives.quantize import Quantized, hadamard_transform
from ..elements import nominal_dtype
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import QuantizedTensorStorage, Writer

__all__ = ["NVFP4TensorStorage"]


class NVFP4TensorStorage(BlockScaledStorage):
    """FP4 codes, two to a byte, with two scale levels.

    Args:
        rowwise_scale_inv: Row-wise block scales uint8 (E4M3).
        columnwise_scale_inv: Column-wise block scales uint8 (E4M3).
        amax_rowwise: Maximum float32 [1], or [M] with row_scaled_nvfp4.
        amax_columnwise: Column-wise maximum float32 [1].
        fp4_dtype: kFloat4E2M1.
        with_gemm_swizzled_scales: The block scales are in matrix-instruction order.
        row_scaled_nvfp4: amax_rowwise holds a maximum per row.
        nvfp4_use_4over6: The codes were chosen by 4over6; they are read like any other.
        nvfp4_e4m3_max: Largest block scale, 448 or 256.
        square_tiles: 16 x 16 values share a scale, so each direction is the transpose of the other.
        transform_signs: Column-wise codes are Hadamard transformed, with (True) or without (False) random signs.
        fake_dtype: Nominal dtype.
        dtype: Alias for fake_dtype.

    The other arguments are as in `Float8BlockwiseQTensorStorage`.
    """

    TENSORS = BlockScaledStorage.TENSORS | {
        "_amax_rowwise": "amax_rowwise",
        "_amax_columnwise": "amax_columnwise",
    }
    ROWWISE = (*BlockScaledStorage.ROWWISE, "_amax_rowwise")
    COLUMNWISE = (*BlockScaledStorage.COLUMNWISE, "_amax_columnwise")
    CONSTANTS = {
        "_fp4_dtype": "fp4_dtype",
        "_quantizer": "quantizer",
        "_with_gemm_swizzled_scales": "with_gemm_swizzled_scales",
        "_square_tiles": "square_tiles",
        "_transform_signs": "transform_signs",
        "_row_scaled_nvfp4": "row_scaled_nvfp4",
        "_nvfp4_use_4over6": "nvfp4_use_4over6",
        "_nvfp4_e4m3_max": "nvfp4_e4m3_max",
        "_dtype": "dtype",
    }
    format = NVFP4
    ELEMENT = "_fp4_dtype"
    PACKING = NVFP4.packing

    _fp4_dtype: DType

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None,
        amax_columnwise: Tensor | None,
        fp4_dtype: DType = DType.kFloat4E2M1,
        quantizer: Writer | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        *,
        square_tiles: bool = False,
        transform_signs: bool | None = None,
        fake_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ):
        rowwise, columnwise = (
            (rowwise_data, rowwise_scale_inv),
            (columnwise_data, columnwise_scale_inv),
        )
        nominal = nominal_dtype(fake_dtype, dtype) or torch.float32
        self._hold(rowwise, columnwise, fp4_dtype, quantizer, nominal)
        self._amax_rowwise = amax_rowwise
        self._amax_columnwise = amax_columnwise
        self._square_tiles = square_tiles
        self._transform_signs = transform_signs
        self._row_scaled_nvfp4 = row_scaled_nvfp4
        self._nvfp4_use_4over6 = nvfp4_use_4over6
        self._nvfp4_e4m3_max = nvfp4_e4m3_max
        self._set_swizzled(with_gemm_swizzled_scales)

    def _direction_format(self, direction: str) -> TensorFormat:
        return NVFP4_FORMATS[self._row_scaled_nvfp4 and direction == ROWWISE, self._nvfp4_e4m3_max]

    @property
    def transposable(self) -> bool:
        return self._square_tiles

    @property
    def column_signs(self) -> bool | None:
        return self._transform_signs

    def _drop_padding(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        return scale[:rows, :columns].view(torch.float8_e4m3fn)

    @classmethod
    def _padded(cls, scale: Tensor, constants: dict[str, Any]) -> Tensor:
        return padded(scale.view(torch.uint8), *cls.SCALE_PADDING)

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> BlockScaledStorage:
        # Maxima per row arrive as a column [M, 1] from row slices and gathers, see `unpack`.
        amax = quantized.amax if quantized.codes is not None else None
        return super().pack(
            quantized,
            shape,
            amax_rowwise=amax if amax is None or amax.dim() == 1 else amax.reshape(-1),
            amax_columnwise=None if quantized.codes_t is None else quantized.amax_t,
            **constants,
        )

    def copy_from_storage(
        self, src: QuantizedTensorStorage, *, noop_flag: Tensor | None = None
    ) -> None:
        if isinstance(src, NVFP4TensorStorage) and self._modes() != src._modes():
            raise RuntimeError(
                f"cannot copy NVFP4 data with {src._modes()} into a tensor with {self._modes()}; quantize_() the "
                "values instead"
            )
        super().copy_from_storage(src, noop_flag=noop_flag)

    def _modes(self) -> dict[str, Any]:
        names = ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")
        return {name: getattr(self, f"_{name}") for name in names}

    def _undo_transform(self, values_t: Tensor) -> Tensor:
        if self._transform_signs is None:
            return values_t
        # H / 4 is symmetric and its own inverse, so y = (x * signs) @ H / 4 gives x = (y @ H / 4) * signs.
        signed = hadamard_transform(values_t, random_sign=False)
        if not self._transform_signs:
            return signed
        units = torch.eye(16, dtype=signed.dtype, device=signed.device)
        signs = 4 * hadamard_transform(units, random_sign=True)[:, 0]
        return (signed.view(-1, 16) * signs).view(signed.shape)

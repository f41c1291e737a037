"""NVFP4TensorStorage: value = code x s x amax / (6 x 448), an E4M3 scale s for 16 elements and one amax a direction.

Two codes a byte, low nibble first: row-wise [..., K/2], column-wise the transpose's [K, .../2]. Scales are E4M3 bytes
padded with zeros, [pad128(M), pad4(ceil(K/16))], and the transpose's. The column-wise codes may be those of Hadamard
transformed values: two such operands contract to the product of the values themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.formats import NVFP4
from ...constants import DType
from ...primitives.quantize import Quantized, hadamard_transform
from ..axis import COLS
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import Writer

__all__ = ["NVFP4TensorStorage"]


class NVFP4TensorStorage(BlockScaledStorage):
    """Two-level scaled FP4.

    square_tiles        16 x 16 elements share a scale, so either direction is the other's transpose
    transform_signs     column-wise codes are Hadamard transformed, with (True) or without random signs; None: not
    """

    TENSORS = BlockScaledStorage.TENSORS | {
        "_amax_rowwise": "amax_rowwise",
        "_amax_columnwise": "amax_columnwise",
    }
    CONSTANTS = {
        "_fp4_dtype": "fp4_dtype",
        "_quantizer": "quantizer",
        "_square_tiles": "square_tiles",
        "_transform_signs": "transform_signs",
        "_dtype": "dtype",
    }
    format = NVFP4
    ELEMENT = "_fp4_dtype"
    PACKING = NVFP4.packing

    _fp4_dtype: DType

    def __init__(
        self, rowwise_data: Tensor | None, rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None, columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None, amax_columnwise: Tensor | None,
        fp4_dtype: DType = DType.kFloat4E2M1, quantizer: Writer | None = None, *,
        square_tiles: bool = False, transform_signs: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        rowwise, columnwise = (rowwise_data, rowwise_scale_inv), (columnwise_data, columnwise_scale_inv)
        self._hold(rowwise, columnwise, fp4_dtype, quantizer, dtype)
        self._amax_rowwise = amax_rowwise
        self._amax_columnwise = amax_columnwise
        self._square_tiles = square_tiles
        self._transform_signs = transform_signs

    @property
    def transposable(self) -> bool:
        return self._square_tiles

    @property
    def column_signs(self) -> bool | None:
        return self._transform_signs

    def _unpadded(self, scale: Tensor, rows: int, columns: int) -> Tensor:
        return scale[:rows, :columns].view(torch.float8_e4m3fn)

    @classmethod
    def _padded(cls, scale: Tensor, constants: dict[str, Any]) -> Tensor:
        return padded(scale.view(torch.uint8), *cls.SCALE_PADDING)

    def _amax_of(self, axis: str) -> Tensor | None:
        return self._amax_rowwise if axis == COLS else self._amax_columnwise

    @classmethod
    def _maxima(cls, quantized: Quantized) -> dict[str, Tensor | None]:
        return {
            "amax_rowwise": None if quantized.codes is None else quantized.amax,
            "amax_columnwise": None if quantized.codes_t is None else quantized.amax_t,
        }

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        amaxes = ("_amax_rowwise",) * rowwise + ("_amax_columnwise",) * columnwise
        return (*BlockScaledStorage._dropped(rowwise, columnwise), *amaxes)

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

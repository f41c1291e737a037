"""NVFP4TensorStorage: value = code x s x amax / (6 x 448), an E4M3 scale s for 16 elements and one amax a direction.

Two codes a byte, low nibble first: row-wise [..., K/2], column-wise the transpose's [K, .../2]. Scales are E4M3 bytes
padded with zeros, [pad128(M), pad4(ceil(K/16))], and the transpose's. The column-wise codes may be those of Hadamard
transformed values: two such operands contract to the product of the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.formats import NVFP4, ceil_div
from ...constants import DType
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized, hadamard_transform
from ..axis import COLS
from .block_scaled import BlockScaledStorage, padded
from .quantized_tensor_storage import matrix_shape

if TYPE_CHECKING:
    from ..quantizer import Quantizer


class NVFP4TensorStorage(BlockScaledStorage):
    """Two-level scaled FP4.

    square_tiles        16 x 16 elements share a scale, so either direction is the other's transpose
    transform_signs     column-wise codes are Hadamard transformed, with (True) or without random signs; None: not
    """

    TENSORS = {
        "_rowwise_data": "rowwise_data",
        "_rowwise_scale_inv": "rowwise_scale_inv",
        "_columnwise_data": "columnwise_data",
        "_columnwise_scale_inv": "columnwise_scale_inv",
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

    def __init__(
        self,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        amax_rowwise: Tensor | None,
        amax_columnwise: Tensor | None,
        fp4_dtype: DType = DType.kFloat4E2M1,
        quantizer: Quantizer | None = None,
        *,
        square_tiles: bool = False,
        transform_signs: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self._rowwise_data = rowwise_data
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_data = columnwise_data
        self._columnwise_scale_inv = columnwise_scale_inv
        self._amax_rowwise = amax_rowwise
        self._amax_columnwise = amax_columnwise
        self._fp4_dtype = DType(fp4_dtype)
        self._quantizer = quantizer
        self._square_tiles = square_tiles
        self._transform_signs = transform_signs
        self._dtype = dtype

    @property
    def transposable(self) -> bool:
        return self._square_tiles

    @property
    def shape(self) -> torch.Size:
        if self._rowwise_data is not None:
            return torch.Size((*self._rowwise_data.shape[:-1], 2 * self._rowwise_data.shape[-1]))
        transpose = self._first_tensor()
        return torch.Size((*transpose.shape[1:-1], 2 * transpose.shape[-1], transpose.shape[0]))

    @property
    def column_signs(self) -> bool | None:
        return self._transform_signs

    def contract(self, axis: str) -> Operand:
        codes, scale = self._of(axis)
        rows, depth = matrix_shape(self.shape)
        amax = self._amax_rowwise
        if axis != COLS:
            rows, depth, amax = depth, rows, self._amax_columnwise
        scale = scale[:rows, : ceil_div(depth, 16)].view(torch.float8_e4m3fn)
        return Operand(codes.reshape(rows, depth // 2), scale, NVFP4, amax, self._dtype)

    @classmethod
    def pack(cls, quantized: Quantized, shape: Sequence[int], **constants: Any) -> NVFP4TensorStorage:
        codes, scale, codes_t, scale_t = quantized[:4]
        return cls(
            rowwise_data=None if codes is None else codes.view(*shape[:-1], shape[-1] // 2),
            rowwise_scale_inv=None if scale is None else padded(scale.view(torch.uint8), 128, 4),
            columnwise_data=None if codes_t is None else codes_t.reshape(_columnwise_shape(shape)),
            columnwise_scale_inv=None if scale_t is None else padded(scale_t.view(torch.uint8), 128, 4),
            amax_rowwise=quantized.amax if codes is not None else None,
            amax_columnwise=quantized.amax_t if codes_t is not None else None,
            **constants,
        )

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        amaxes = ("_amax_rowwise",) * rowwise + ("_amax_columnwise",) * columnwise
        return (*BlockScaledStorage._dropped(rowwise, columnwise), *amaxes)

    def viewed(self, shape: Sequence[int]) -> NVFP4TensorStorage | None:
        if not len(shape) or shape[-1] != self.shape[-1]:
            return None
        rowwise, columnwise = self._rowwise_data, self._columnwise_data
        return NVFP4TensorStorage(
            rowwise_data=None if rowwise is None else rowwise.view(*shape[:-1], shape[-1] // 2),
            rowwise_scale_inv=self._rowwise_scale_inv,
            columnwise_data=None if columnwise is None else columnwise.reshape(_columnwise_shape(shape)),
            columnwise_scale_inv=self._columnwise_scale_inv,
            amax_rowwise=self._amax_rowwise,
            amax_columnwise=self._amax_columnwise,
            **self.constants(),
        )

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


def _columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """[K, ..., last / 2]: leading dimensions stay apart where the last of them is even, and merge where it is odd."""
    if len(shape) > 1 and shape[-2] % 2 == 0:
        return (shape[-1], *shape[:-2], shape[-2] // 2)
    rows, depth = matrix_shape(shape)
    return (depth, rows // 2)

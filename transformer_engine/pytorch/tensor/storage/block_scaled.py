"""What the block-scaled storages share: codes and scales for each direction, value = code x scale of its block."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import round_up
from ...primitives.quantize import dequantize
from ..axis import COLS, ROWS
from .quantized_tensor_storage import QuantizedTensorStorage


def padded(scale: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """scale [r, c] with zeros up to multiples of both; itself when there is nothing to add."""
    rows, columns = scale.shape
    more_rows = round_up(rows, row_multiple) - rows
    more_columns = round_up(columns, column_multiple) - columns
    if more_rows or more_columns:
        return torch.nn.functional.pad(scale, (0, more_columns, 0, more_rows))
    return scale


class BlockScaledStorage(QuantizedTensorStorage):
    """Two independent directions, each with codes and scales."""

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None

    def get_usages(self) -> dict[str, bool]:
        return {
            "rowwise": self._rowwise_data is not None,
            "columnwise": self._columnwise_data is not None,
        }

    def _of(self, axis: str) -> tuple[Tensor, Tensor]:
        """(codes, scales) of a direction, as stored."""
        rowwise = axis == COLS
        codes = self._rowwise_data if rowwise else self._columnwise_data
        scale = self._rowwise_scale_inv if rowwise else self._columnwise_scale_inv
        if codes is None or scale is None:
            raise self._missing(axis)
        return codes, scale

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        prefixes = ("_rowwise",) * rowwise + ("_columnwise",) * columnwise
        return tuple(f"{prefix}_{part}" for prefix in prefixes for part in ("data", "scale_inv"))

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self._rowwise_data is not None:
            return dequantize(self.contract(COLS)._replace(dtype=dtype)).view(self.shape)
        values_t = dequantize(self.contract(ROWS)._replace(dtype=dtype))
        return self._undo_transform(values_t).t().contiguous().view(self.shape)

    def _undo_transform(self, values_t: Tensor) -> Tensor:
        """The inverse of what was done to the column direction before it was quantized."""
        raise NotImplementedError

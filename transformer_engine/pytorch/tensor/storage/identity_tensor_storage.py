"""IdentityTensorStorage: values [..., K] as they are; both directions are views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...primitives.operand import Operand, plain
from ...primitives.quantize import Quantized
from ..axis import COLS
from .quantized_tensor_storage import QuantizedTensorStorage, Writer, plain_matrix

__all__ = ["IdentityTensorStorage"]


class IdentityTensorStorage(QuantizedTensorStorage):
    """High-precision values where a storage is expected."""

    TENSORS = {"_data": "data"}
    CONSTANTS = {"_quantizer": "quantizer", "_dtype": "dtype"}
    format = TensorFormat("identity", None, "none")

    _data: Tensor | None

    def __init__(
        self, data: Tensor | None, *, quantizer: Writer | None = None, dtype: torch.dtype | None = None
    ):
        self._data = data
        self._quantizer = quantizer
        self._dtype = dtype if dtype is not None else data.dtype if data is not None else torch.float32

    @property
    def shape(self) -> torch.Size:
        return self._first_tensor().shape

    def contract(self, axis: str) -> Operand:
        matrix = plain_matrix(self._first_tensor())
        return plain(matrix if axis == COLS else matrix.t())

    @classmethod
    def pack(cls, quantized: Quantized, shape: Sequence[int], **constants: Any) -> IdentityTensorStorage:
        codes = quantized.codes
        if codes is None and quantized.codes_t is not None:
            codes = quantized.codes_t.t()
        return cls(None if codes is None else codes.reshape(shape), **constants)

    @property
    def transposable(self) -> bool:
        return True

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": True}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing: the values serve both directions."""

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        return ()

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._first_tensor().to(dtype)

    def viewed(self, shape: Sequence[int]) -> IdentityTensorStorage:
        return IdentityTensorStorage(self._first_tensor().view(shape), **self.constants())

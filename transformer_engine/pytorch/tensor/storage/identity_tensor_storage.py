"""IdentityTensorStorage: unquantized values [..., K]; both directions are views of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...primitives.operand import ROWWISE, Operand, plain
from ...primitives.quantize import Quantized
from ...runtime.checks import floating
from ..elements import nominal_dtype
from .quantized_tensor_storage import QuantizedTensorStorage, Writer, plain_matrix

__all__ = ["IdentityTensorStorage"]


class IdentityTensorStorage(QuantizedTensorStorage):
    """High-precision values where a storage is expected.

    Args:
        hp_data: The values [.., K], floating point; None while autograd keeps them.
        fake_dtype: Nominal dtype, by default hp_data's.
        quantizer: Quantizer that writes into this storage; None for read-only storages.
        dtype: Alias for fake_dtype.
    """

    TENSORS = {"_data": "hp_data"}
    ROWWISE = COLUMNWISE = ()  # the values serve both directions
    CONSTANTS = {"_quantizer": "quantizer", "_dtype": "dtype"}
    format = TensorFormat("identity", None, "none")

    _data: Tensor | None

    def __init__(
        self,
        *,
        hp_data: Tensor | None,
        fake_dtype: torch.dtype | None = None,
        quantizer: Writer | None = None,
        dtype: torch.dtype | None = None,
    ):
        if hp_data is not None:
            floating("hp_data", hp_data)
        nominal = nominal_dtype(fake_dtype, dtype)
        self._data = hp_data
        self._quantizer = quantizer
        self._dtype = (
            nominal if nominal is not None else torch.float32 if hp_data is None else hp_data.dtype
        )

    @property
    def _hp_data(self) -> Tensor | None:
        """The values, under NVIDIA's attribute name."""
        return self._data

    @_hp_data.setter
    def _hp_data(self, values: Tensor | None) -> None:
        self._data = values

    @property
    def shape(self) -> torch.Size:
        return self._first_tensor().shape

    def contract(self, direction: str) -> Operand:
        matrix = plain_matrix(self._first_tensor())
        return plain(matrix if direction == ROWWISE else matrix.t())

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> IdentityTensorStorage:
        codes = quantized.codes
        if codes is None and quantized.codes_t is not None:
            codes = quantized.codes_t.t()
        return cls(hp_data=None if codes is None else codes.reshape(shape), **constants)

    @property
    def transposable(self) -> bool:
        return True

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": True}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Do nothing, because the values serve both directions."""

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._first_tensor().to(dtype)

    def with_shape(self, shape: Sequence[int]) -> IdentityTensorStorage:
        return IdentityTensorStorage(hp_data=self._first_tensor().view(shape), **self.constants())

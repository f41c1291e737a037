"""No quantization: encode(x [..., K]) = x. The null object wherever a quantizer is expected."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives.operand import plain
from ..runtime.checks import values_dtype
from .quantized_tensor import QuantizedTensor
from .quantizer import Operands, Quantizer, TransposedValues
from .storage.identity_tensor_storage import IdentityTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """High-precision values with the interface of a quantized tensor.

    The other arguments are as in `QuantizedTensor`.
    """

    STORAGE = IdentityTensorStorage

    def _default_quantizer(self) -> Quantizer:
        return IdentityQuantizer()

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_identity_tensor_in_reduce_ex, (
            self._data,
            self.dtype,
            self.shape,
            self._quantizer,
        )


class IdentityQuantizer(Quantizer):
    """Keeps high-precision values where a quantized tensor is expected.

    Args:
        dtype: Value dtype; None keeps the input's dtype.
        rowwise: Accepted for compatibility; the values serve both directions.
        columnwise: Like rowwise.

    Raises:
        TypeError: The dtype is not a floating-point dtype.
    """

    TENSOR = IdentityTensor
    is_identity = True
    dtype: torch.dtype | None = None  # for pickles that do not say

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None:
            values_dtype("dtype", dtype)
            self.dtype, self.is_identity = dtype, False

    def _converted(self, values: Tensor) -> Tensor:
        return values if self.dtype is None else values.detach().to(self.dtype)

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> IdentityTensorStorage:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.decode(tensor.dtype)
        return IdentityTensorStorage(hp_data=self._converted(tensor), quantizer=self)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        matrix = self._converted(matrix)
        return Operands(plain(matrix), TransposedValues(matrix))

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> IdentityTensorStorage:
        stored_dtype = dtype if self.dtype is None else self.dtype
        values = torch.empty(shape, dtype=stored_dtype, device=device, pin_memory=pin_memory)
        return IdentityTensorStorage(hp_data=values, quantizer=self)

    def _configuration(self) -> Hashable:
        return self.dtype


def _make_identity_tensor_in_reduce_ex(
    data: Tensor, dtype: torch.dtype, shape: Sequence[int], quantizer: Quantizer | None = None
) -> IdentityTensor:
    """Return an IdentityTensor from its pickle."""
    return IdentityTensor(shape, dtype, hp_data=data, quantizer=quantizer)  # pyright: ignore[reportReturnType]


PICKLED = (_make_identity_tensor_in_reduce_ex,)

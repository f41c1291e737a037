"""No quantization: encode(x [..., K]) = x. The null object of everything that takes a quantizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..primitives.operand import plain
from .quantized_tensor import QuantizedTensor
from .quantizer import Matrix, Operands, Quantizer
from .storage.identity_tensor_storage import IdentityTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


class IdentityQuantizer(Quantizer):
    """Holds high-precision values where a quantized tensor is expected."""

    is_identity = True

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> IdentityTensorStorage:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.decode(tensor.dtype)
        return IdentityTensorStorage(tensor, quantizer=self, dtype=tensor.dtype)

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        return Operands(plain(matrix), Matrix(matrix))

    def wrap(self, storage: QuantizedTensorStorage, *, requires_grad: bool = False) -> IdentityTensor:
        return IdentityTensor.from_storage(storage, requires_grad=requires_grad)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None, pin_memory: bool
    ) -> IdentityTensorStorage:
        values = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return IdentityTensorStorage(values, quantizer=self, dtype=dtype)

    def _configuration(self) -> Hashable:
        return ()


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """High-precision values in the clothes of a quantized tensor."""

    STORAGE = IdentityTensorStorage

    def _default_quantizer(self) -> Quantizer:
        return IdentityQuantizer()

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_identity_tensor_in_reduce_ex, (self._data, self.dtype, self.shape, self._quantizer)


def _make_identity_tensor_in_reduce_ex(
    data: Tensor, dtype: torch.dtype, shape: Sequence[int], quantizer: Quantizer | None = None
) -> IdentityTensor:
    """An IdentityTensor from its pickle."""
    return IdentityTensor(shape, dtype, data=data, quantizer=quantizer)  # pyright: ignore[reportReturnType]


PICKLED = (_make_identity_tensor_in_reduce_ex,)

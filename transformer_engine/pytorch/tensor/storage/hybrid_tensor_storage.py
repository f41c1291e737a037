"""HybridQuantizedTensorStorage: row-wise data in one format, column-wise data in another.

The tensors of both parts lie in numbered slots, so that all bookkeeping of storages works on them; what the slots
mean is in the two parts' rebuilds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized
from ..axis import COLS
from .quantized_tensor_storage import QuantizedTensorStorage, Rebuild, Writer

__all__ = ["HybridQuantizedTensorStorage"]

_SLOTS = 6  # NVFP4 has the most tensors
_ROWWISE = tuple(f"_rowwise_{i}" for i in range(_SLOTS))
_COLUMNWISE = tuple(f"_columnwise_{i}" for i in range(_SLOTS))


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two storages of one direction each."""

    TENSORS = {name: name.lstrip("_") for name in (*_ROWWISE, *_COLUMNWISE)}
    CONSTANTS = {
        "_rowwise_rebuild": "rowwise_rebuild",
        "_columnwise_rebuild": "columnwise_rebuild",
        "_quantizer": "quantizer",
        "_dtype": "dtype",
    }

    def __init__(
        self,
        *,
        rowwise_rebuild: Rebuild | None = None,
        columnwise_rebuild: Rebuild | None = None,
        quantizer: Writer | None = None,
        dtype: torch.dtype = torch.float32,
        **slots: Tensor | None,
    ):
        for name, keyword in self.TENSORS.items():
            setattr(self, name, slots.get(keyword))
        self._rowwise_rebuild = rowwise_rebuild
        self._columnwise_rebuild = columnwise_rebuild
        self._quantizer = quantizer
        self._dtype = dtype

    @classmethod
    def of(
        cls,
        rowwise: QuantizedTensorStorage | None,
        columnwise: QuantizedTensorStorage | None,
        quantizer: Writer | None,
        dtype: torch.dtype,
    ) -> HybridQuantizedTensorStorage:
        """The two parts as one storage."""
        slots: dict[str, Tensor | None] = {}
        rebuilds: list[Rebuild | None] = []
        for part, names in ((rowwise, _ROWWISE), (columnwise, _COLUMNWISE)):
            tensors, rebuild = ((), None) if part is None else part.flatten()
            rebuilds.append(rebuild)
            slots |= {name.lstrip("_"): tensor for name, tensor in zip(names, tensors, strict=False)}
        return cls(
            rowwise_rebuild=rebuilds[0],
            columnwise_rebuild=rebuilds[1],
            quantizer=quantizer,
            dtype=dtype,
            **slots,
        )

    @property
    def rowwise_storage(self) -> QuantizedTensorStorage | None:
        """The part that products along COLS read."""
        return self._part(_ROWWISE, self._rowwise_rebuild)

    @property
    def columnwise_storage(self) -> QuantizedTensorStorage | None:
        """The part that products along ROWS read."""
        return self._part(_COLUMNWISE, self._columnwise_rebuild)

    def _part(self, names: tuple[str, ...], rebuild: Rebuild | None) -> QuantizedTensorStorage | None:
        tensors = [getattr(self, name) for name in names]
        if rebuild is None or all(tensor is None for tensor in tensors):
            return None
        return rebuild(tensors[: len(rebuild.storage_class.TENSORS)])

    def _any_part(self) -> QuantizedTensorStorage:
        part = self.rowwise_storage or self.columnwise_storage
        if part is None:
            raise RuntimeError(
                f"{type(self).__name__} holds no data; call restore_from_saved before using it"
            )
        return part

    @property
    def format(self) -> TensorFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.columnwise_storage or self._any_part()).format

    @property
    def transposable(self) -> bool:
        return False

    @property
    def shape(self) -> torch.Size:
        return self._any_part().shape

    @property
    def column_signs(self) -> bool | None:
        part = self.columnwise_storage
        return None if part is None else part.column_signs

    def contract(self, axis: str) -> Operand:
        part = self.rowwise_storage if axis == COLS else self.columnwise_storage
        if part is None:
            raise self._missing(axis)
        return part.contract(axis)._replace(dtype=self._dtype)

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> HybridQuantizedTensorStorage:
        rowwise = quantized._replace(codes_t=None, scale_t=None, amax_t=None)
        columnwise = quantized._replace(codes=None, scale=None, amax=None)
        parts = [
            None if data is None else rebuild.storage_class.pack(part, shape, **dict(rebuild.constants))
            for data, part, rebuild in (
                (quantized.codes, rowwise, constants["rowwise_rebuild"]),
                (quantized.codes_t, columnwise, constants["columnwise_rebuild"]),
            )
        ]
        return cls.of(parts[0], parts[1], constants["quantizer"], constants["dtype"])

    def get_usages(self) -> dict[str, bool]:
        return {
            "rowwise": self.rowwise_storage is not None,
            "columnwise": self.columnwise_storage is not None,
        }

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        return _ROWWISE * rowwise + _COLUMNWISE * columnwise

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._any_part().decode(dtype)

    def viewed(self, shape: Sequence[int]) -> HybridQuantizedTensorStorage | None:
        parts = (self.rowwise_storage, self.columnwise_storage)
        views = [None if part is None else part.viewed(shape) for part in parts]
        if any(part is not None and view is None for part, view in zip(parts, views, strict=True)):
            return None
        return HybridQuantizedTensorStorage.of(views[0], views[1], self._quantizer, self._dtype)

    def byte_layout(self) -> tuple[Any, ...]:
        parts = (self.rowwise_storage, self.columnwise_storage)
        return tuple(None if part is None else (type(part), part.byte_layout()) for part in parts)

    def row_granularity(self) -> int:
        parts = (self.rowwise_storage, self.columnwise_storage)
        return max(part.row_granularity() for part in parts if part is not None)

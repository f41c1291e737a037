"""HybridQuantizedTensorStorage: row-wise data in one format, column-wise data in another.

The tensors of both parts are in numbered slots, so that storage bookkeeping applies to them; the
rebuilds of the two parts define the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ....common.numbers import with_article
from ...primitives.operand import ROWWISE, Operand
from ...primitives.quantize import Quantized
from ..elements import nominal_dtype
from .quantized_tensor_storage import QuantizedTensorStorage, Rebuild, Writer

__all__ = ["HybridQuantizedTensorStorage"]

_SLOTS = 6  # NVFP4 has the most tensors
_ROWWISE = tuple(f"_rowwise_{i}" for i in range(_SLOTS))
_COLUMNWISE = tuple(f"_columnwise_{i}" for i in range(_SLOTS))
_REBUILDS = ("rowwise_rebuild", "columnwise_rebuild")
_SLOT_KEYWORDS = (*_REBUILDS, *(name.lstrip("_") for name in (*_ROWWISE, *_COLUMNWISE)))


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two storages, each with one direction. The row-wise part, or the only part, has the values.

    Args:
        rowwise_storage: The part that products along the last dimension read.
        columnwise_storage: The part that products along the rows read, with the same shape.
        quantizer: Quantizer that writes into this storage; None for read-only storages.
        fake_dtype: Nominal dtype, by default the first part's.
        dtype: Alias for fake_dtype.
        slots: The fields of both parts, as `get_metadata()` returns them.

    Raises:
        ValueError: No part, parts with two shapes or devices, or a part without data for its direction.
    """

    TENSORS = {name: name.lstrip("_") for name in (*_ROWWISE, *_COLUMNWISE)}
    ROWWISE, COLUMNWISE = _ROWWISE, _COLUMNWISE
    CONSTANTS = {
        "_rowwise_rebuild": "rowwise_rebuild",
        "_columnwise_rebuild": "columnwise_rebuild",
        "_quantizer": "quantizer",
        "_dtype": "dtype",
    }

    def __init__(
        self,
        *,
        rowwise_storage: QuantizedTensorStorage | None = None,
        columnwise_storage: QuantizedTensorStorage | None = None,
        quantizer: Writer | None = None,
        fake_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        **slots: Any,  # the parts as `flatten` took them apart: numbered tensors, and what makes storages of them
    ):
        parts = {"rowwise_storage": rowwise_storage, "columnwise_storage": columnwise_storage}
        nominal = nominal_dtype(fake_dtype, dtype)
        if not slots:
            agreed = _check_agreement(parts)
            nominal = agreed.dtype if nominal is None else nominal
            slots = {}
            for part, names, rebuild in zip(
                parts.values(), (_ROWWISE, _COLUMNWISE), _REBUILDS, strict=True
            ):
                tensors, slots[rebuild] = (
                    ((), None) if part is None else part.as_storage().flatten()
                )
                slots |= {
                    name.lstrip("_"): tensor for name, tensor in zip(names, tensors, strict=False)
                }
        for name in slots:
            if name not in _SLOT_KEYWORDS:
                raise TypeError(
                    f"{type(self).__name__} has no {name!r}; give rowwise_storage, columnwise_storage, quantizer and "
                    "fake_dtype"
                )
        for name, keyword in self.TENSORS.items():
            setattr(self, name, slots.get(keyword))
        self._rowwise_rebuild = slots.get("rowwise_rebuild")
        self._columnwise_rebuild = slots.get("columnwise_rebuild")
        self._quantizer = quantizer
        self._dtype = torch.float32 if nominal is None else nominal

    @property
    def rowwise_storage(self) -> QuantizedTensorStorage | None:
        """The part that products along ROWWISE read."""
        return self._part(_ROWWISE, self._rowwise_rebuild)

    @property
    def columnwise_storage(self) -> QuantizedTensorStorage | None:
        """The part that products along COLUMNWISE read."""
        return self._part(_COLUMNWISE, self._columnwise_rebuild)

    # NVIDIA's names.
    rowwise_sub_storage = _rowwise_storage = rowwise_storage
    columnwise_sub_storage = _columnwise_storage = columnwise_storage

    def _part(
        self, names: tuple[str, ...], rebuild: Rebuild | None
    ) -> QuantizedTensorStorage | None:
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

    def contract(self, direction: str) -> Operand:
        part = self.rowwise_storage if direction == ROWWISE else self.columnwise_storage
        if part is None:
            raise self._missing(direction)
        return part.contract(direction)._replace(dtype=self._dtype)

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> HybridQuantizedTensorStorage:
        rowwise = quantized._replace(codes_t=None, scale_t=None, amax_t=None)
        columnwise = quantized._replace(codes=None, scale=None, amax=None)
        parts = [
            None
            if data is None
            else rebuild.storage_class.pack(part, shape, **dict(rebuild.constants))
            for data, part, rebuild in (
                (quantized.codes, rowwise, constants["rowwise_rebuild"]),
                (quantized.codes_t, columnwise, constants["columnwise_rebuild"]),
            )
        ]
        return cls(
            rowwise_storage=parts[0],
            columnwise_storage=parts[1],
            quantizer=constants["quantizer"],
            dtype=constants["dtype"],
        )

    def get_usages(self) -> dict[str, bool]:
        return {
            "rowwise": self.rowwise_storage is not None,
            "columnwise": self.columnwise_storage is not None,
        }

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._any_part().decode(dtype)

    def with_shape(self, shape: Sequence[int]) -> HybridQuantizedTensorStorage | None:
        parts = (self.rowwise_storage, self.columnwise_storage)
        views = [None if part is None else part.with_shape(shape) for part in parts]
        if any(part is not None and view is None for part, view in zip(parts, views, strict=True)):
            return None
        return HybridQuantizedTensorStorage(
            rowwise_storage=views[0],
            columnwise_storage=views[1],
            quantizer=self._quantizer,
            dtype=self._dtype,
        )

    def byte_layout(self) -> tuple[Any, ...]:
        parts = (self.rowwise_storage, self.columnwise_storage)
        return tuple(None if part is None else (type(part), part.byte_layout()) for part in parts)

    def row_granularity(self) -> int:
        parts = (self.rowwise_storage, self.columnwise_storage)
        return max(part.row_granularity() for part in parts if part is not None)


def _check_agreement(parts: dict[str, QuantizedTensorStorage | None]) -> QuantizedTensorStorage:
    """Return the first part, after checking that the parts are storages of one tensor, each with its direction."""
    present = {name: part for name, part in parts.items() if part is not None}
    if not present:
        raise ValueError(
            "HybridQuantizedTensorStorage holds no data; give rowwise_storage, columnwise_storage or both"
        )
    first_name, first = next(iter(present.items()))
    for name, part in present.items():
        if not isinstance(part, QuantizedTensorStorage):
            raise TypeError(
                f"{name} is {with_article(type(part))}; give a QuantizedTensorStorage, for example "
                "te.IdentityTensorStorage(hp_data=..) of plain values"
            )
        if not hasattr(part, "TENSORS"):
            raise TypeError(
                f"{name} is {with_article(type(part))} of a custom quantizer, which does not name its TENSORS; give a "
                "storage of one of the formats here"
            )
        if len(part.TENSORS) > _SLOTS:
            raise TypeError(
                f"{name} is {with_article(type(part))}, which holds {len(part.TENSORS)} tensors; a part of one format "
                f"holds {_SLOTS} at most, so give its own part of this direction"
            )
        direction = name.removesuffix("_storage")
        if not part.get_usages()[direction]:
            raise ValueError(
                f"{name} has no {direction} data; quantize its values after quantizer.set_usage({direction}=True)"
            )
        if part.shape != first.shape or part.device != first.device:
            raise ValueError(
                f"{name} is {tuple(part.shape)} on {part.device}, {first_name} {tuple(first.shape)} on "
                f"{first.device}; give two parts of one tensor"
            )
    return first

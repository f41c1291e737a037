"""Row-wise codes by one quantizer, column-wise codes by another: forward and backward products in other formats."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.checks import check_option, described
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage, Rebuild

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]


COLUMNWISE_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """A tensor with one format per direction. `dequantize` reads the row-wise part, or the only part.

    The arguments are the storage's, then those of `QuantizedTensor`.
    """

    STORAGE = HybridQuantizedTensorStorage

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_hybrid_tensor_in_reduce_ex, (
            [getattr(self, name) for name in self.TENSORS],
            (self._rowwise_rebuild, self._columnwise_rebuild),
            self.dtype,
            self.shape,
            self._quantizer,
        )


class HybridQuantizer(Quantizer):
    """Quantizes each direction with its own quantizer.

    Args:
        rowwise_quantizer: Row-wise quantizer.
        columnwise_quantizer: Column-wise quantizer.
        columnwise_source: Source for the column-wise codes: "original", the tensor, or "rowwise_dequantized", the
            values of its row-wise codes, so that the backward pass differentiates the forward computation.
        rowwise: Make row-wise codes; this replaces the setting of rowwise_quantizer.
        columnwise: Make column-wise codes; this replaces the setting of columnwise_quantizer.

    Raises:
        ValueError: columnwise_source has another value.
    """

    TENSOR = HybridQuantizedTensor
    columnwise_source = "original"  # for pickles that do not say

    def __init__(
        self,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        *,
        columnwise_source: str = "original",
        rowwise: bool = True,
        columnwise: bool = True,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, quantizer in (
            ("rowwise_quantizer", rowwise_quantizer),
            ("columnwise_quantizer", columnwise_quantizer),
        ):
            if not isinstance(quantizer, Quantizer):
                raise TypeError(
                    f"{name}={described(quantizer)} is not a Quantizer; give an instance of one, "
                    "te.IdentityQuantizer() for high precision"
                )
        check_option("columnwise_source", columnwise_source, COLUMNWISE_SOURCES)
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source

    @property
    def column_signs(self) -> bool | None:
        return self.columnwise_quantizer.column_signs

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> HybridQuantizedTensorStorage:
        rows = columns = None
        of_rows = columnwise and self.columnwise_source == "rowwise_dequantized"
        if rowwise or of_rows:
            rows = self.rowwise_quantizer.encode(tensor, True, False, noop_flag=noop_flag)
        if columnwise:
            source = rows.dequantize(dtype=tensor.dtype) if of_rows and rows is not None else tensor
            columns = self.columnwise_quantizer.encode(source, False, True, noop_flag=noop_flag)
        rows = rows if rowwise else None
        return HybridQuantizedTensorStorage(
            rowwise_storage=rows, columnwise_storage=columns, quantizer=self, dtype=tensor.dtype
        )

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> HybridQuantizedTensorStorage:
        def part(quantizer: Quantizer, rowwise: bool) -> QuantizedTensorStorage:
            quantizer = quantizer.copy()
            quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
            return quantizer.empty(shape, dtype, device, pin_memory)

        rows = part(self.rowwise_quantizer, True) if self.rowwise_usage else None
        columns = part(self.columnwise_quantizer, False) if self.columnwise_usage else None
        return HybridQuantizedTensorStorage(
            rowwise_storage=rows, columnwise_storage=columns, quantizer=self, dtype=dtype
        )

    def is_requantization_safe(self) -> bool:
        """Return whether all quantizers for the enabled directions are safe."""
        used = []
        if self.rowwise_usage or (
            self.columnwise_usage and self.columnwise_source == "rowwise_dequantized"
        ):
            used.append(self.rowwise_quantizer)
        if self.columnwise_usage:
            used.append(self.columnwise_quantizer)
        return all(quantizer.is_requantization_safe() for quantizer in used)

    def calibrate(self, tensor: Tensor) -> None:
        self.rowwise_quantizer.calibrate(tensor)
        self.columnwise_quantizer.calibrate(tensor)

    def unsupported_shape_reason(
        self, shape: Sequence[int], rowwise: bool, columnwise: bool
    ) -> str | None:
        reads_rows = rowwise or (columnwise and self.columnwise_source == "rowwise_dequantized")
        reason = (
            self.rowwise_quantizer.unsupported_shape_reason(shape, True, False)
            if reads_rows
            else None
        )
        if reason is None and columnwise:
            reason = self.columnwise_quantizer.unsupported_shape_reason(shape, False, True)
        return reason

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> HybridQuantizer:
        rowwise = self.rowwise_quantizer.with_reduction_group(group)
        columnwise = self.columnwise_quantizer.with_reduction_group(group)
        if rowwise is self.rowwise_quantizer and columnwise is self.columnwise_quantizer:
            return self
        copied = copy.copy(self)
        copied.rowwise_quantizer, copied.columnwise_quantizer = rowwise, columnwise
        return copied

    def _configuration(self) -> Hashable:
        return (self.rowwise_quantizer, self.columnwise_quantizer, self.columnwise_source)


def _make_hybrid_tensor_in_reduce_ex(
    slots: Sequence[Tensor | None],
    rebuilds: tuple[Rebuild | None, Rebuild | None],
    dtype: torch.dtype,
    shape: Sequence[int],
    quantizer: Quantizer | None = None,
) -> HybridQuantizedTensor:
    """Return a HybridQuantizedTensor from its pickle."""
    constants = {
        "rowwise_rebuild": rebuilds[0],
        "columnwise_rebuild": rebuilds[1],
        "quantizer": quantizer,
    }
    tensors = dict(zip(HybridQuantizedTensorStorage.TENSORS.values(), slots, strict=True))
    storage = HybridQuantizedTensorStorage(**tensors, **constants, dtype=dtype)
    return HybridQuantizedTensor.from_storage(storage, shape=shape)


PICKLED = (_make_hybrid_tensor_in_reduce_ex,)

"""Observing(quantizer, record): quantize like quantizer, and pass each matrix and its operand to record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..primitives.operand import COLUMNWISE, ROWWISE, Operand, OwnedOperand
from .quantizer import Operands, Quantizer, TransposedValues
from .storage.quantized_tensor_storage import QuantizedTensorStorage, plain_matrix

Record = Callable[[Tensor, Operand | None], None]


def _forward_method(name: str) -> Any:
    """Return a method that calls the method with the same name on the observed quantizer."""
    return lambda self, *args, **kwargs: getattr(self.quantizer, name)(*args, **kwargs)


class Observing(Quantizer):
    """A quantizer with another's results; it calls record(x [M, K], operand of x) for each matrix.

    It has no `cast`, because the values must exist for the comparison; codes in two steps are equal. It records nothing
    while torch.compile traces, nor in quantizers that repeat a call.
    """

    def __init__(self, quantizer: Quantizer, record: Record):
        super().__init__(rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage)
        self.internal, self.optimize_for_gemm = quantizer.internal, quantizer.optimize_for_gemm
        self.quantizer, self.record = quantizer, record
        self.is_identity = quantizer.is_identity

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        encoded = self.quantizer.encode(tensor, rowwise, columnwise, noop_flag=noop_flag)
        if not torch.compiler.is_compiling() and isinstance(encoded, QuantizedTensorStorage):
            directions = encoded.get_usages()
            self._show(
                plain_matrix(tensor),
                Operands(
                    encoded.contract(ROWWISE) if directions["rowwise"] else None,
                    encoded.contract(COLUMNWISE) if directions["columnwise"] else None,
                ),
            )
        return encoded

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        quantized = self.quantizer.operands(matrix, rowwise, columnwise)
        if not torch.compiler.is_compiling():
            self._show(matrix, quantized)
        return quantized

    def _show(self, matrix: Tensor, operands: Operands) -> None:
        """Record one direction, rows if present: transformed columns cannot be compared with values."""
        rows, columns = operands
        if rows is not None:
            self.record(matrix, _comparable(rows))
        elif (
            columns is not None
            and not isinstance(columns, TransposedValues)
            and self.column_signs is None
        ):
            self.record(matrix.t(), _comparable(columns))
        else:
            self.record(matrix, None)

    wrap = _forward_method("wrap")
    empty = _forward_method("empty")
    calibrate = _forward_method("calibrate")
    unsupported_shape_reason = _forward_method("unsupported_shape_reason")
    replay_state = _forward_method("replay_state")
    replaying = _forward_method("replaying")
    is_requantization_safe = _forward_method("is_requantization_safe")
    shard_granularity = _forward_method("shard_granularity")
    supports_only_rowwise_all_gather = _forward_method("supports_only_rowwise_all_gather")
    _get_compatible_recipe = _forward_method("_get_compatible_recipe")

    def with_reduction_group(self, group: torch.distributed.ProcessGroup) -> Quantizer:
        return Observing(self.quantizer.with_reduction_group(group), self.record)

    def sharing_scale(self, group: torch.distributed.ProcessGroup) -> Quantizer:
        """Observe a copy of the delayed-scaling quantizer with the least scale over the ranks of a group."""
        return Observing(self.quantizer.sharing_scale(group), self.record)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def column_signs(self) -> bool | None:
        return self.quantizer.column_signs

    def __getattr__(self, name: str) -> Any:
        """Return the observed quantizer's attribute, for example its scale or dtype."""
        if name == "quantizer":
            raise AttributeError(name)
        return getattr(self.quantizer, name)


def _comparable(operand: Operand) -> Operand | None:
    """Return the operand; None for a custom format or values that are not quantized."""
    return None if isinstance(operand, OwnedOperand) or operand.format is None else operand

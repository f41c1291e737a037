"""Observing(quantizer, record): quantizes as quantizer does, and shows record each matrix beside what became of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.recipe import Recipe
from ..primitives.operand import COLS, ROWS, Operand, OwnedOperand
from .quantizer import Matrix, Operands, Quantizer
from .storage.quantized_tensor_storage import QuantizedTensorStorage, plain_matrix

Record = Callable[[Tensor, Operand | None], None]


class Observing(Quantizer):
    """A quantizer whose results are those of another; record(x [M, K], x as a product reads it) sees each of them.

    It asks no kernel that makes a matrix to quantize it on the way: the values have to be there to be compared. The
    codes are the same in two steps. Nothing is recorded while a compiler traces, nor by quantizers that repeat a call.
    """

    def __init__(self, quantizer: Quantizer, record: Record):
        super().__init__(rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage)
        self.internal, self.optimize_for_gemm = quantizer.internal, quantizer.optimize_for_gemm
        self.quantizer, self.record = quantizer, record
        self.is_identity = quantizer.is_identity

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensorStorage:
        made = self.quantizer.encode(tensor, rowwise, columnwise, noop_flag=noop_flag)
        if not torch.compiler.is_compiling() and isinstance(made, QuantizedTensorStorage):
            directions = made.get_usages()
            self._show(
                plain_matrix(tensor),
                Operands(
                    made.contract(COLS) if directions["rowwise"] else None,
                    made.contract(ROWS) if directions["columnwise"] else None,
                ),
            )
        return made

    def operands(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> Operands:
        made = self.quantizer.operands(matrix, rowwise, columnwise)
        if not torch.compiler.is_compiling():
            self._show(matrix, made)
        return made

    def _show(self, matrix: Tensor, made: Operands) -> None:
        """One direction, rows where there are any: transformed columns cannot be compared with values."""
        rows, columns = made
        if rows is not None:
            self.record(matrix, _comparable(rows))
        elif columns is not None and not isinstance(columns, Matrix) and self.column_signs is None:
            self.record(matrix.t(), _comparable(columns))
        else:
            self.record(matrix, None)

    def wrap(self, storage: QuantizedTensorStorage, *, requires_grad: bool = False) -> Tensor:
        return self.quantizer.wrap(storage, requires_grad=requires_grad)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None, pin_memory: bool
    ) -> QuantizedTensorStorage:
        return self.quantizer.empty(shape, dtype, device, pin_memory)

    @property
    def column_signs(self) -> bool | None:
        return self.quantizer.column_signs

    def calibrate(self, tensor: Tensor) -> None:
        self.quantizer.calibrate(tensor)

    def shape_refusal(self, shape: Sequence[int], rowwise: bool, columnwise: bool) -> str | None:
        return self.quantizer.shape_refusal(shape, rowwise, columnwise)

    def replay_state(self) -> tuple[Tensor, ...]:
        return self.quantizer.replay_state()

    def replaying(self, state: tuple[Tensor, ...]) -> Quantizer:
        return self.quantizer.replaying(state)

    def _get_compatible_recipe(self) -> type[Recipe] | None:
        return self.quantizer._get_compatible_recipe()

    def reducing_over(self, group: torch.distributed.ProcessGroup) -> Quantizer:
        return self.quantizer.reducing_over(group)

    def supports_only_rowwise_all_gather(self) -> bool:
        return self.quantizer.supports_only_rowwise_all_gather()

    def _configuration(self) -> Hashable:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        """What callers read of the quantizer's own: its scale, its dtype."""
        if name == "quantizer":
            raise AttributeError(name)
        return getattr(self.quantizer, name)


def _comparable(operand: Operand) -> Operand | None:
    """The operand, unless only its owner can read it or it is not quantized."""
    return None if isinstance(operand, OwnedOperand) or operand.format is None else operand

"""CustomOperand: a matrix [rows, K] in a format that only the quantizer of a custom recipe can multiply.

Such a quantizer multiplies by `qgemm(qx, qw, m_params, out_dtype, sx, sw, bias, gemm_type=, qresult_x=,
qresult_w=)`, qx @ qw.T, and its tensors have `data` and `scale` for rows, `data_t` and `scale_t` for columns.
One without `qgemm` makes tensors that can `dequantize()`: their values are multiplied.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.formats import TensorFormat
from ..primitives.operand import COLUMNWISE, ROWWISE, Operand, OwnedOperand, plain

_FORMAT = TensorFormat("custom", None, "none")


class GEMMType(enum.Enum):
    """The three products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """Product options."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


class Halves(NamedTuple):
    """Codes and scale for one direction."""

    data: Tensor
    scale: Tensor | None


class CustomOperand(OwnedOperand):
    """One direction of a custom quantizer's tensor; only the extents of its codes are read."""

    made: Any
    columnwise: bool

    @classmethod
    def of(cls, quantized: Any, direction: str) -> CustomOperand:
        halves = _halves(quantized, direction)
        codes = halves.data.reshape(-1, halves.data.shape[-1])
        self = cls(codes, halves.scale, _FORMAT)
        self.made, self.columnwise = quantized, direction != ROWWISE
        return self

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that products read."""
        halves = _halves(self.made, COLUMNWISE if self.columnwise else ROWWISE)
        return halves.data, halves.scale

    def split_tensors(
        self,
    ) -> tuple[list[Tensor | None], Callable[[list[Tensor | None]], tuple[Any, int]]]:
        """Return (tensors for save_for_backward, function that rebuilds the operand and returns how many it used)."""
        direction = COLUMNWISE if self.columnwise else ROWWISE
        tensors, emptied = self.made.prepare_for_saving()

        def together(saved: list[Tensor | None]) -> tuple[CustomOperand, int]:
            rest = emptied.restore_from_saved(saved)
            return CustomOperand.of(emptied, direction), len(saved) - len(rest)

        return list(tensors), together

    def multiplied(self, other: Operand, epilogue: Any) -> Tensor:
        """Return self [M, K] @ other [N, K].T, computed by the quantizer of self."""
        if not isinstance(other, CustomOperand):
            raise TypeError(
                f"{type(self.made).__name__} of a custom quantizer meets an operand of another kind; give input, "
                "weight and grad_output of a layer custom quantizers of one family, or dequantize() without qgemm"
            )
        kind = {
            (False, False): GEMMType.FPROP,
            (False, True): GEMMType.DGRAD,
            (True, True): GEMMType.WGRAD,
        }[self.columnwise, other.columnwise]
        x, w = (_halves(o.made, COLUMNWISE if o.columnwise else ROWWISE) for o in (self, other))
        params = MMParams(
            epilogue.dtype if epilogue.out is None else epilogue.out.dtype, epilogue.exact
        )
        product = self.made._quantizer.qgemm(
            x.data,
            w.data,
            params,
            params.out_dtype,
            x.scale,
            w.scale,
            None,
            gemm_type=kind,
            qresult_x=self.made,
            qresult_w=other.made,
        )
        return epilogue.finish(product)


def _halves(quantized: Any, direction: str) -> Halves:
    data, scale = (
        (quantized.data, quantized.scale)
        if direction == ROWWISE
        else (quantized.data_t, quantized.scale_t)
    )
    if data is None:
        missing = "row-wise" if direction == ROWWISE else "column-wise"
        raise RuntimeError(
            f"{type(quantized).__name__} has no {missing} data; its quantizer makes the directions of its usages"
        )
    return Halves(data, scale)


def contracted(quantized: Any, direction: str, quantizer: Any) -> Operand:
    """Return a custom quantizer's tensor as an operand in one direction."""
    if hasattr(quantizer, "qgemm"):
        return CustomOperand.of(quantized, direction)
    values = quantized.dequantize()
    matrix = values.reshape(-1, values.shape[-1])
    return plain(matrix if direction == ROWWISE else matrix.t())


def list_attributes(quantized: Any) -> tuple[str, ...]:
    """Return the attributes in TENSORS; for a class of another library without it, all attributes with a tensor."""
    if hasattr(quantized, "TENSORS"):
        return tuple(quantized.TENSORS)
    names = tuple(name for name, value in vars(quantized).items() if isinstance(value, Tensor))
    # all are None while the tensors are saved elsewhere
    quantized._found = names or getattr(quantized, "_found", ())
    return quantized._found

"""FormatRow: the maths of one format, as called by code that serves every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import TensorFormat, ceil_div
from ....common.kernels.launch import Launch
from ..operand import Operand
from .spec import Quantized, QuantizeRequest, QuantizeSpec

_SCALE_DTYPES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


class QuantizeInputs(NamedTuple):
    """The optional tensors of a quantization; see `quantize`."""

    multiplier: Tensor | None = None
    amax: Tensor | None = None
    amax_t: Tensor | None = None
    random: tuple[Tensor, Tensor] | None = None
    record: Tensor | None = None


# Quantize matrices of one request's shape, dtype and device.
PlannedCall = Callable[[Tensor, QuantizeInputs], Quantized]
Plan = Callable[[QuantizeRequest], PlannedCall]
Maxima = Callable[
    [Tensor, QuantizeSpec, "Tensor | None", "Tensor | None"], "tuple[Tensor | None, Tensor | None]"
]


def as_float32(value: Tensor | None) -> Tensor | None:
    """Return a scale or maximum as kernels read it; `to` alone costs the host more than the comparison."""
    return value if value is None or value.dtype is torch.float32 else value.to(torch.float32)


@dataclass(frozen=True)
class FormatRow:
    """The maths of one format.

    Attributes:
        format: Format description.
        quantize: The reference: codes for x [M, K] by literal float32 operations on any device.
        dequantize: `dequantize(operand, scale)` returns the values [rows, K] in operand.dtype.
        check: `check(rows, depth, spec)` raises ValueError for an unsupported shape; None: every shape is supported.
        plan: `plan(request)` returns the kernels' call for these matrices; None: there are no kernels.
        maxima: `maxima(x, spec, amax, amax_t)` returns the maxima for the second scale level; None: one level.
        matrices: `matrices(spec, shape, count)` returns the launch that quantizes matrices by an address table.
        empty_scale: `empty_scale(x, rows, depth)` returns uninitialized scales in the kernels' layout; None: row-major.
    """

    format: TensorFormat
    quantize: Callable[[Tensor, QuantizeSpec, QuantizeInputs], Quantized]
    dequantize: Callable[[Operand, Tensor], Tensor]
    check: Callable[[int, int, QuantizeSpec], None] | None = None
    plan: Plan | None = None
    maxima: Maxima | None = None
    empty_scale: Callable[[Tensor, int, int], Tensor] | None = None
    matrices: Callable[[QuantizeSpec, tuple[int, int], int], Launch] | None = None

    def new_scale(self, x: Tensor, rows: int, depth: int) -> Tensor:
        """Allocate scales for a matrix [rows, depth] on x's device, one per block, in the kernels' layout."""
        if self.empty_scale is not None:
            return self.empty_scale(x, rows, depth)
        block = self.format.block
        assert block is not None
        shape = (ceil_div(rows, block[0]), ceil_div(depth, block[1]))
        return x.new_empty(shape, dtype=_SCALE_DTYPES[self.format.scale])

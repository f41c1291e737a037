"""FormatRow: what code that serves every format asks a format for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ....common.formats import TensorFormat, ceil_div
from ..operand import Operand
from .spec import Quantized, QuantizeSpec, Request

_SCALE_DTYPES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


class Given(NamedTuple):
    """What a quantization may be given beside the matrix: see `quantize`."""

    multiplier: Tensor | None = None
    amax: Tensor | None = None
    amax_t: Tensor | None = None
    random: tuple[Tensor, Tensor] | None = None
    record: Tensor | None = None


class PlannedCall(Protocol):
    """The codes of matrices that one request describes."""

    def __call__(
        self,
        x: Tensor,
        multiplier: Tensor | None,
        amax: Tensor | None,
        amax_t: Tensor | None,
        record: Tensor | None,
        random: tuple[Tensor, Tensor] | None = None,
    ) -> Quantized: ...


Plan = Callable[[Request], PlannedCall]
Maxima = Callable[
    [Tensor, QuantizeSpec, "Tensor | None", "Tensor | None"], "tuple[Tensor | None, Tensor | None]"
]


def empty_scale(form: TensorFormat, x: Tensor, rows: int, depth: int) -> Tensor:
    """Uninitialised scales of a matrix [rows, depth], one a block, on x's device."""
    assert form.block is not None
    shape = (ceil_div(rows, form.block[0]), ceil_div(depth, form.block[1]))
    return x.new_empty(shape, dtype=_SCALE_DTYPES[form.scale])


def takes_any_shape(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Nothing to refuse."""


@dataclass(frozen=True)
class FormatRow:
    """One format's maths.

    format       its description
    quantize     the reference: codes of x [M, K] by literal float32 operations on any device
    dequantize   (operand, its scale) -> values [rows, K] in operand.dtype
    check        (rows, depth, spec): ValueError where the shape does not fit
    plan         (request) -> the kernels' call for such matrices; None: there are no kernels
    maxima       (x, spec, amax, amax_t) -> those that blocks are scaled with, of a format with two levels
    empty_scale  (x, rows, depth) -> uninitialised scales that lie as the kernels' do; None: row after row
    """

    format: TensorFormat
    quantize: Callable[[Tensor, QuantizeSpec, Given], Quantized]
    dequantize: Callable[[Operand, Tensor], Tensor]
    check: Callable[[int, int, QuantizeSpec], None] = takes_any_shape
    plan: Plan | None = None
    maxima: Maxima | None = None
    empty_scale: Callable[[Tensor, int, int], Tensor] | None = None

    def new_scale(self, x: Tensor, rows: int, depth: int) -> Tensor:
        """Uninitialised scales of a matrix [rows, depth], as the kernels make them."""
        if self.empty_scale is None:
            return empty_scale(self.format, x, rows, depth)
        return self.empty_scale(x, rows, depth)

"""FormatRow: what code that serves every format asks a format for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array

from ....common.formats import TensorFormat
from ..operand import Operand
from .spec import Given, Quantized, QuantizeSpec, Request

PlannedCall = Callable[[Array, Given], Quantized]


def takes_any_shape(rows: int, depth: int, spec: QuantizeSpec) -> None:
    """Nothing to refuse."""


@dataclass(frozen=True)
class FormatRow:
    """One format's maths.

    format       its description
    quantize     the reference: codes of x [*M, *K], whose K begins at an axis, by literal float32 operations on any
                 device; with one scale for all, codes like x of any shape, whatever the direction
    dequantize   (operand, its scales as they lie along its axes) -> values [*rows, *K] in float32
    check        (rows, depth, spec): ValueError where the shape does not fit
    plan         (request) -> what computes it by kernels
    """

    format: TensorFormat
    quantize: Callable[[Array, QuantizeSpec, Given, int], Quantized]
    dequantize: Callable[[Operand, Array], Array]
    plan: Callable[[Request], PlannedCall]
    check: Callable[[int, int, QuantizeSpec], None] = takes_any_shape

"""FP8 with one float32 scale per matrix: reference and kernels.

A given multiplier takes one kernel, which also finds the maximum; otherwise another kernel finds the maximum first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .....common.formats import FLOAT8, Element
from ... import exact
from ...kernels import Kernel
from ...launching import perform, run
from ...operand import Operand
from ...partitioning import ShardingRule
from ...several_axes import call_on_axes
from .. import elements, tiles
from ..spec import FormatRow, Quantized, QuantizeInputs, QuantizeSpec, Request, jax_dtype

_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)


def quantize(x: Array, spec: QuantizeSpec, inputs: QuantizeInputs, axis: int) -> Quantized:
    """Encode x to codes in the shape of x, one scale [1] and the maximum; both directions have equal codes."""
    amax = inputs.amax
    if amax is None:
        amax = exact.maximum_over_axes(elements.absolute_maximum(x), inputs.over)
    if inputs.multiplier is not None:
        multiplier = elements.nonzero_multiplier(inputs.multiplier)
    else:
        multiplier = elements.scale_from_amax(
            amax, spec.element.maximum, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    multiplier, scale = tiles.settle_scales(
        (multiplier, exact.reciprocal(multiplier.astype(jnp.float32)))
    )
    return Quantized(elements.encode(x, spec.element, multiplier), scale, amax=amax)


def dequantize(operand: Operand, scale: Array) -> Array:
    """Compute codes * scale."""
    return exact.scaled(operand.codes.astype(jnp.float32), scale)


@dataclass(frozen=True)
class Maximum(Kernel):
    """x [rows, width] -> max|x| [1], or per row [rows] if by_rows"""

    by_rows: bool = False

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule(f"r w -> {'r' if self.by_rows else 'o'}", maxed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows = operands[0].shape[0] if self.by_rows else 1
        return (jax.ShapeDtypeStruct((rows,), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import cast  # imports triton

        (x,) = arrays
        launch = cast.row_maxima(x.shape) if self.by_rows else cast.absolute_maximum(x.size)
        (amax,) = run(launch, arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class ScaledCast(Kernel):
    """(x [rows, width], multiplier or maximum [1]) -> [codes], [codes_t], scale [1], [maximum [1]]

    Attributes:
        element: Code element type.
        rowwise: Whether codes [rows, width] are a result.
        columnwise: Whether codes [width, rows] are a result.
        measures: Whether the second operand is a multiplier, where 0 is read as 1, and max|x| is a result; otherwise
            the operand is the maximum, from which the kernel derives the multiplier.
        power_of_two: Whether the derived multiplier is a power of two.
        epsilon: Least maximum for the derived multiplier.
    """

    element: Element
    rowwise: bool
    columnwise: bool
    measures: bool
    power_of_two: bool
    epsilon: float

    @property
    def rule(self) -> ShardingRule:
        codes = ["r w"] * self.rowwise + ["w r"] * self.columnwise
        outputs = [*codes, "i", *["o"] * self.measures]
        return ShardingRule(
            f"r w, s -> {', '.join(outputs)}", maxed=(len(codes) + 1,) * self.measures
        )

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, width = operands[0].shape
        dtype = jax_dtype(self.element)
        shapes = [(rows, width)] * self.rowwise + [(width, rows)] * self.columnwise
        codes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return (*codes, *[_ONE] * (1 + self.measures))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import cast  # it imports triton

        x, operand = arrays
        rows, width = x.shape
        program = cast.one_scale(
            (rows, width),
            self.element,
            self.rowwise,
            self.columnwise,
            cast.MEASURED if self.measures else cast.GIVEN,
            power_of_two=self.power_of_two,
            epsilon=self.epsilon,
            zero_is_one=self.measures,
        )
        inputs = [x, operand] if self.measures else [x, None, operand]
        codes, scale, codes_t, scale_t, amax = perform(program, inputs)
        results = (
            codes,
            codes_t,
            scale if self.rowwise else scale_t,
            amax if self.measures else None,
        )
        return tuple(array for array in results if array is not None)


def quantize_by_kernels(x: Array, inputs: QuantizeInputs, request: Request) -> Quantized:
    """Compute a request with kernels."""
    spec = request.spec
    directions, axis = (spec.element, spec.rowwise, spec.columnwise), request.axis
    counts = {"r": axis, "w": x.ndim - axis}
    if inputs.multiplier is not None:
        kernel, number = ScaledCast(*directions, True, False, 0.0), inputs.multiplier
    else:
        kernel = ScaledCast(*directions, False, spec.power_of_two, spec.epsilon)
        number = inputs.amax
        if number is None:
            number = exact.maximum_over_axes(call_on_axes(Maximum(), counts, x)[0], inputs.over)
    number = number.astype(jnp.float32).reshape(1)
    results = list(call_on_axes(kernel, counts, x, number))
    codes = results.pop(0) if spec.rowwise else None
    codes_t = results.pop(0) if spec.columnwise else None
    scale, amax = (
        results[0],
        exact.maximum_over_axes(results[1], inputs.over) if kernel.measures else number,
    )
    return Quantized(
        codes,
        scale if spec.rowwise else None,
        codes_t,
        scale if spec.columnwise else None,
        amax if inputs.amax is None else inputs.amax,
    )


ROWS = (FormatRow(FLOAT8, quantize, dequantize, quantize_by_kernels),)

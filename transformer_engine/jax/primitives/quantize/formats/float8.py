"""FP8 quantization with one float32 scale per matrix: the reference and the Triton kernels.

With a given multiplier (delayed scaling), one kernel casts and measures the maximum. Without one (current scaling), a
first kernel measures the maximum, and a second kernel casts.
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
from ..spec import FormatRow, Quantized, QuantizeInputs, QuantizeRequest, QuantizeSpec, jax_dtype

_SCALAR = jax.ShapeDtypeStruct((1,), jnp.float32)


def quantize(x: Array, spec: QuantizeSpec, inputs: QuantizeInputs, axis: int) -> Quantized:
    """Quantize x with one scale [1]. The codes have x's shape and serve both directions.

    `axis` has no effect, because the scale belongs to all elements.
    """
    amax = inputs.amax
    if amax is None:
        amax = exact.maximum_over_axes(elements.absolute_maximum(x), inputs.mesh_axes)
    if inputs.multiplier is not None:
        multiplier = elements.nonzero_multiplier(inputs.multiplier)
    else:
        multiplier = elements.scale_from_amax(
            amax, spec.element.maximum, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    multiplier, scale = tiles.materialize_scales(
        (multiplier, exact.reciprocal(multiplier.astype(jnp.float32)))
    )
    return Quantized(elements.encode(x, spec.element, multiplier), scale, amax=amax)


def dequantize(operand: Operand, scale: Array) -> Array:
    """Compute codes * scale."""
    return exact.scaled(operand.codes.astype(jnp.float32), scale)


@dataclass(frozen=True)
class AbsoluteMaximum(Kernel):
    """Compute max|x| [1] from x [rows, width], or [rows] if by_rows."""

    by_rows: bool = False

    @property
    def rule(self) -> ShardingRule:
        return ShardingRule(f"r w -> {'r' if self.by_rows else 'o'}", maxed=(0,))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows = operands[0].shape[0] if self.by_rows else 1
        return (jax.ShapeDtypeStruct((rows,), jnp.float32),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import cast

        (x,) = arrays
        launch = cast.row_maxima(x.shape) if self.by_rows else cast.absolute_maximum(x.size)
        (amax,) = run(launch, arrays)
        assert amax is not None
        return (amax,)


@dataclass(frozen=True)
class ScaledCast(Kernel):
    """Cast x [rows, width] to codes with one scale.

    Operands are x and a multiplier or an absolute maximum [1]. Results are codes if `rowwise`, codes_t if `columnwise`,
    scale [1], and the absolute maximum [1] if `multiplier_given`.

    Attributes:
        element: Code element type.
        rowwise: Whether codes [rows, width] are a result.
        columnwise: Whether codes [width, rows] are a result.
        multiplier_given: Whether the second operand is a multiplier (0 is read as 1); the kernel then also returns
            max|x|. Otherwise the operand is max|x|, from which the kernel derives the multiplier.
        power_of_two: Whether the derived multiplier is a power of two.
        epsilon: Lower bound of the maximum before the multiplier is derived.
    """

    element: Element
    rowwise: bool
    columnwise: bool
    multiplier_given: bool
    power_of_two: bool
    epsilon: float

    @property
    def rule(self) -> ShardingRule:
        outputs = []
        if self.rowwise:
            outputs.append("r w")
        if self.columnwise:
            outputs.append("w r")
        outputs.append("scale")
        maxed: tuple[int, ...] = ()
        if self.multiplier_given:
            maxed = (len(outputs),)
            outputs.append("amax")
        return ShardingRule(f"r w, operand -> {', '.join(outputs)}", maxed=maxed)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows, width = operands[0].shape
        dtype = jax_dtype(self.element)
        outputs = []
        if self.rowwise:
            outputs.append(jax.ShapeDtypeStruct((rows, width), dtype))
        if self.columnwise:
            outputs.append(jax.ShapeDtypeStruct((width, rows), dtype))
        outputs.append(_SCALAR)
        if self.multiplier_given:
            outputs.append(_SCALAR)
        return tuple(outputs)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from .....common.kernels import cast

        x, operand = arrays
        rows, width = x.shape
        program = cast.one_scale(
            (rows, width),
            self.element,
            self.rowwise,
            self.columnwise,
            cast.MEASURED if self.multiplier_given else cast.GIVEN,
            power_of_two=self.power_of_two,
            epsilon=self.epsilon,
            zero_is_one=self.multiplier_given,
        )
        inputs = [x, operand] if self.multiplier_given else [x, None, operand]
        codes, scale, codes_t, scale_t, amax = perform(program, inputs)
        results = (
            codes,
            codes_t,
            scale if self.rowwise else scale_t,
            amax if self.multiplier_given else None,
        )
        return tuple(array for array in results if array is not None)


def quantize_by_kernels(x: Array, inputs: QuantizeInputs, request: QuantizeRequest) -> Quantized:
    """Quantize x as requested, with Triton kernels."""
    spec, axis = request.spec, request.axis
    counts = {"r": axis, "w": x.ndim - axis}
    if inputs.multiplier is not None:
        kernel = ScaledCast(
            spec.element,
            spec.rowwise,
            spec.columnwise,
            multiplier_given=True,
            power_of_two=False,
            epsilon=0.0,
        )
        operand = inputs.multiplier
    else:
        kernel = ScaledCast(
            spec.element,
            spec.rowwise,
            spec.columnwise,
            multiplier_given=False,
            power_of_two=spec.power_of_two,
            epsilon=spec.epsilon,
        )
        operand = inputs.amax
        if operand is None:
            (measured,) = call_on_axes(AbsoluteMaximum(), counts, x)
            operand = exact.maximum_over_axes(measured, inputs.mesh_axes)
    operand = operand.astype(jnp.float32).reshape(1)
    results = list(call_on_axes(kernel, counts, x, operand))
    codes = results.pop(0) if spec.rowwise else None
    codes_t = results.pop(0) if spec.columnwise else None
    scale = results[0]
    if inputs.amax is not None:
        amax = inputs.amax
    elif kernel.multiplier_given:
        amax = exact.maximum_over_axes(results[1], inputs.mesh_axes)
    else:
        amax = operand
    return Quantized(
        codes,
        scale if spec.rowwise else None,
        codes_t,
        scale if spec.columnwise else None,
        amax,
    )


FORMAT_ROWS = (FormatRow(FLOAT8, quantize, dequantize, quantize_by_kernels),)
